"""Hardware and software of each rank, and unwanted differences between ranks."""

from __future__ import annotations

import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from costmodels.pytorch import full_version
from costmodels.spec.record import GIB
from planner.version import version
from runtime.parallel.accelerator import device_module, is_accelerator

LEAST_FREE = 0.9
"""Share of the ranks' usual free memory below which another process is assumed to use memory."""

MOST_SKEW_S = 30.0
"""Difference in seconds between two hosts' clocks that is reported, as logs and checkpoints then seem out of
order."""

DIFFERENT_BY_NODE = ("--log-dir", "--tensorboard-dir")
"""Flags that may name different folders on each node."""


@dataclass(frozen=True)
class RankReport:
    """The hardware, software and flags of one rank."""

    rank: int
    host: str
    device: str
    memory_bytes: int
    free_bytes: int | None
    """Free bytes of the rank's device; None on a CPU, whose memory all ranks of a host share."""
    software: dict[str, str]
    clock_s: float
    """Seconds of the host's clock at the same moment on all ranks."""
    local_ranks: int
    arguments: tuple[str, ...] = ()
    """Flags of the job given to this rank."""

    @property
    def name(self) -> str:
        """A text with the rank and its host."""
        return f"rank {self.rank} on {self.host}"


def rank_report(
    rank: int, local_ranks: int, device: torch.device, arguments: Sequence[str], memory_bytes: float
) -> RankReport:
    """The report of this rank.

    Args:
        memory_bytes: bytes of a CPU rank's share of its host's memory.
    """
    software = {
        "PyTorch": full_version(),
        "Python": platform.python_version().rpartition(".")[0],
        "planner": version() or "source tree",
    }
    name, total, free = "cpu", int(memory_bytes), None
    if is_accelerator(device):
        module = device_module(device)
        name = module.get_device_name(device)
        free, total = module.mem_get_info(device)
    if device.type == "cuda":
        software["CUDA"] = str(torch.version.cuda or torch.version.hip)
        software["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return RankReport(
        *(rank, socket.gethostname(), name, total, free, software, time.time(), local_ranks),
        arguments=tuple(_comparable(arguments)),
    )


def _comparable(arguments: Sequence[str]) -> Iterator[str]:
    """Flags that must be the same on all ranks, each with its values as one text."""
    found: list[str] = []
    for word in arguments:
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return (text for text in found if text.partition(" ")[0] not in DIFFERENT_BY_NODE)


def mismatches(reports: Sequence[RankReport], kinds: int = 1) -> Iterator[str]:
    """Differences between ranks that would fail or slow the job, one in each line.

    Args:
        kinds: kinds of devices for which the job is planned.
    """
    devices = Counter(report.device for report in reports)
    if len(devices) > kinds:
        yield from _odd("device", [(report, report.device) for report in reports])
    for name in reports[0].software:
        yield from _odd(name, [(report, report.software.get(name, "none")) for report in reports])
    yield from _odd("ranks on its node", [(report, str(report.local_ranks)) for report in reports])
    for device in devices:
        alike = [report for report in reports if report.device == device and report.free_bytes is not None]
        usual = statistics.median(report.free_bytes or 0 for report in alike) if alike else 0
        for report in alike:
            if (report.free_bytes or 0) < LEAST_FREE * usual:
                yield (
                    f"{report.name}: {(report.free_bytes or 0) / GIB:.1f} GiB of memory are free, "
                    f"{usual / GIB:.1f} usually"
                )
    usual_flags = Counter(report.arguments for report in reports).most_common(1)[0][0]
    for report in _first_of_hosts(report for report in reports if report.arguments != usual_flags):
        odd = sorted(set(report.arguments) ^ set(usual_flags))
        yield f"{report.name}: other flags than most ranks: {', '.join(odd)}"


def _odd(what: str, values: Sequence[tuple[RankReport, str]]) -> Iterator[str]:
    """The ranks whose value differs from the majority's, once for each host."""
    usual = Counter(value for _, value in values).most_common(1)[0][0]
    by_rank = {report.rank: value for report, value in values}
    for report in _first_of_hosts(report for report, value in values if value != usual):
        yield f"{report.name}: {what} {by_rank[report.rank]}, but {usual} on most ranks"


def _first_of_hosts(reports: Iterator[RankReport]) -> Iterator[RankReport]:
    seen: set[str] = set()
    for report in reports:
        if report.host not in seen:
            seen.add(report.host)
            yield report


def clock_note(reports: Sequence[RankReport]) -> str:
    """A note on clocks of hosts that differ; empty where they agree."""
    first, last = min(r.clock_s for r in reports), max(r.clock_s for r in reports)
    if last - first <= MOST_SKEW_S:
        return ""
    ahead = max(reports, key=lambda report: report.clock_s)
    return f"the clock of {ahead.host} is {last - first:.0f} s ahead of that of another host"


def report_table(reports: Sequence[RankReport]) -> Iterator[str]:
    """A line for each group of equal ranks: ranks, host, device, memory, software, clock."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for report in reports:
        free = "" if report.free_bytes is None else f", {report.free_bytes / GIB:.1f} free"
        software = " ".join(f"{name} {value}" for name, value in report.software.items())
        what = (report.host, report.device, f"{report.memory_bytes / GIB:.1f} GiB{free}", software)
        groups.setdefault(what, []).append(report.rank)
    for (host, device, memory, software), ranks in groups.items():
        yield f"  ranks {_ranges(ranks)} on {host}: {device}, {memory}, {software}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as `0-3, 8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
