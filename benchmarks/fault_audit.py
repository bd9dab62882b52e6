"""Comparison of a run that was killed repeatedly with an undisturbed run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.logs.metrics_file import read_metrics
from runtime.logs.sample_log import read_samples

_RESUMED = re.compile(r"resumed from \S+ at iteration (\d+)")
_SAVED = re.compile(r"saved checkpoint \S+iter_0*(\d+)")
_LAYOUT = re.compile(r" as (tp=.*)")


@dataclass(frozen=True)
class Attempt:
    """One start of a job, read from its folder."""

    folder: Path
    output: str
    resumed_at: int
    """The iteration of the checkpoint that it loaded; 0 without one."""
    saved: int
    """The iteration of the last checkpoint whose save it logged; 0 without one."""
    layout: str
    """The layout of the attempt; empty if it was killed before it had one."""
    reached: int
    """The last logged iteration; 0 without one."""


def attempt(folder: Path) -> Attempt:
    """Read the files of an attempt from its folder."""
    log = folder / "output"
    output = log.read_text(errors="replace") if log.exists() else ""
    resumed = _RESUMED.search(output)
    saved = _SAVED.findall(output)
    layout = _LAYOUT.search(output)
    steps = [record["iteration"] for record in read_metrics(folder) if "loss" in record]
    return Attempt(
        folder,
        output,
        int(resumed[1]) if resumed else 0,
        int(saved[-1]) if saved else 0,
        layout[1] if layout else "",
        max(steps, default=0),
    )


@dataclass
class Audit:
    """Differences from an undisturbed run."""

    largest_difference: float = math.inf
    """The largest relative difference of the losses of all iterations."""
    missing: list[int] = field(default_factory=list)
    """Iterations without a loss."""
    lost: list[int] = field(default_factory=list)
    """Number of samples that no counted step consumed."""
    repeated: list[int] = field(default_factory=list)
    """Number of samples that several counted steps consumed."""
    changed: list[int] = field(default_factory=list)
    """Number of samples with other tokens."""
    lost_checkpoints: list[int] = field(default_factory=list)
    """Number of logged checkpoints from which the next attempt did not continue."""

    def failures(self, tolerance: float) -> list[str]:
        """The faults that were found, in words."""
        found = [
            f"{len(v)} {name.replace('_', ' ')}" for name, v in vars(self).items() if name in _LISTS and v
        ]
        if not self.largest_difference <= tolerance:
            found.append(f"losses differ by {self.largest_difference:.1e}")
        return found


_LISTS = ("missing", "lost", "repeated", "changed", "lost_checkpoints")


def audit(attempts: Sequence[Attempt], reference: Path, steps: int) -> Audit:
    """Compare the counted steps of all attempts, in their order, with a run in `reference`.

    Steps of an attempt count if they came before the checkpoint from which the next attempt continued.
    """
    losses: dict[int, float] = {}
    samples: dict[int, dict[int, int]] = {}
    result = Audit()
    newest = 0
    for one in attempts:
        started = bool(one.layout)
        if started:
            if one.resumed_at < newest:
                result.lost_checkpoints.append(newest)
            for record in (losses, samples):
                for iteration in [i for i in record if i > one.resumed_at]:
                    del record[iteration]  # type: ignore[attr-defined]
        for entry in read_metrics(one.folder):
            if "loss" in entry and entry["iteration"] > one.resumed_at:
                losses[entry["iteration"]] = entry["loss"]
        for iteration, step in read_samples(one.folder).items():
            if iteration > one.resumed_at:
                samples[iteration] = step
        newest = max(newest, one.saved)
    expected = {r["iteration"]: r["loss"] for r in read_metrics(reference) if "loss" in r}
    result.missing = [i for i in range(1, steps + 1) if i not in losses]
    differences = [abs(losses[i] - loss) / abs(loss) for i, loss in expected.items() if i in losses]
    result.largest_difference = max(differences, default=math.inf)
    _audit_samples(result, samples, read_samples(reference))
    return result


def _audit_samples(
    result: Audit, samples: dict[int, dict[int, int]], expected: dict[int, dict[int, int]]
) -> None:
    wanted = {number: (step, check) for step, row in expected.items() for number, check in row.items()}
    seen: dict[int, int] = {}
    for step, row in samples.items():
        for number, check in row.items():
            if number in seen:
                result.repeated.append(number)
            seen[number] = step
            if number in wanted and wanted[number] != (step, check):
                result.changed.append(number)
    result.lost = sorted(set(wanted) - set(seen))
    result.repeated += sorted(set(seen) - set(wanted))
