"""The check of all ranks before training; every rank calls it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from costmodels.catalogue.local_machine import available_memory
from costmodels.errors import InputError
from runtime.logs.console import say
from runtime.parallel.accelerator import kind_of
from runtime.parallel.ranks import Ranks, run_on_first_rank
from runtime.preflight import report, speed
from runtime.preflight.preflight_options import PreflightOptions

TABLE = "network.csv"
"""File in the log folder with the measured collectives, for --network-table."""

REPORT = "preflight.json"


def preflight(
    options: PreflightOptions,
    ranks: Ranks,
    device: torch.device,
    arguments: Sequence[str],
    log_dir: str | None,
    kinds: int = 1,
) -> str | None:
    """Compare all ranks, and measure them if requested; returns the file of the network table, if any.

    Args:
        arguments: flags of the job, which should be the same on every rank.
        log_dir: folder for the first rank's results; a temporary folder for the table if None.
        kinds: kinds of devices of the job.

    Raises:
        InputError: ranks differ where they must be equal; a table of the ranks has been printed.
    """
    if options.preflight == "off" or ranks.world_size == 1:
        return None
    mine = report.rank_report(
        *(ranks.rank, ranks.local_world_size, device, arguments),
        memory_bytes=available_memory() / ranks.local_world_size,
    )
    reports: list[report.RankReport] = [mine] * ranks.world_size
    dist.all_gather_object(reports, mine)
    run_on_first_rank(lambda: _check(reports, kinds))
    if options.preflight != "measure":
        return None
    rate = speed.gemm_rate(device)
    groups = list(speed.group_rates(ranks.rank, ranks.local_world_size, ranks.world_size, device))
    links = speed.link_rates(ranks.rank, ranks.local_world_size, ranks.world_size, device)
    found = [(rate, groups, links)] * ranks.world_size
    dist.all_gather_object(found, (rate, groups, links))
    return run_on_first_rank(lambda: _publish(reports, found, ranks.local_world_size, device, log_dir))


def _check(reports: Sequence[report.RankReport], kinds: int) -> None:
    """Raise `InputError` for differing ranks, after printing a table of the ranks."""
    note = report.clock_note(reports)
    if note:
        say(f"preflight: warning: {note}", sys.stderr)
    problems = list(report.mismatches(reports, kinds))
    if not problems:
        return
    say("preflight: the ranks of this job differ:", sys.stderr)
    for line in report.report_table(reports):
        say(line, sys.stderr)
    raise InputError(f"{'; '.join(problems)}; make them alike, or give --preflight off")


def _publish(
    reports: Sequence[report.RankReport],
    found: Sequence[tuple[float, list[speed.GroupRate], list[speed.LinkRate]]],
    local_ranks: int,
    device: torch.device,
    log_dir: str | None,
) -> str:
    """Report slow devices and links, and write the measurements; returns the file of the network table."""
    rates = [rate for rate, _, _ in found]
    groups = [group for _, each, _ in found for group in each]
    links = [link for _, _, each in found for link in each]
    hosts = [each.host for each in reports[::local_ranks]]
    say(f"preflight: {len(reports)} ranks, {min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s each")
    rows = speed.table_rows(groups, links, local_ranks)
    for row in rows[1:]:
        name, devices, nodes, rate, _ = row.split(",")
        say(f"preflight: {name} of {devices} ranks on {nodes} nodes: {rate} GB/s of the bus")
    names = [each.name for each in reports]
    for line in (
        *speed.slow_devices(rates, names, kind_of(device)),
        *speed.slow_nodes([each for _, each, _ in found], local_ranks, hosts),
        *speed.slow_links(links, hosts),
    ):
        say(f"preflight: {line}")
    folder = Path(tempfile.mkdtemp(prefix="planner-preflight-") if log_dir is None else log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / TABLE
        table.write_text("\n".join(rows) + "\n")
        told = {
            "ranks": [asdict(each) | {"flops_per_s": rate} for each, rate in zip(reports, rates, strict=True)]
        }
        (folder / REPORT).write_text(json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"--log-dir {folder}: cannot write there ({error.strerror})") from None
    return str(table)
