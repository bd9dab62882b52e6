"""Errors of memory on each source of measurements by constants that have not seen it, and OOM verdicts.

python -m benchmarks.unseen_memory --rows FILE... [--only SOURCE]... [--json] [--write]

Rows with a published peak are used, even without a step time. --write sets the ranges of engines' memory in
costmodels/catalogue/calibrated_memory.yaml.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy import WIDTH, read_all, tell_skipped
from benchmarks.calibrate_memory import write_memory
from benchmarks.calibration.left_out_memory import (
    UnseenMemory,
    loader_with,
    memory_spreads,
    memory_without,
    says_memory,
    unseen_memory,
)
from benchmarks.calibration.measurements import SkippedRow
from benchmarks.calibration.memory_fit import memory_fit_plans
from benchmarks.calibration.scores import PeakError, oom_score
from cli.tables import console, table
from costmodels.catalogue.yaml_files import catalogue_file
from costmodels.errors import InputError
from planner.options.flags import while_read


def unseen_memories(
    files: Sequence[str], only: Sequence[str] | None = None
) -> tuple[dict[str, UnseenMemory], list[SkippedRow]]:
    """Errors of every source with data on memory, by constants fitted without its rows."""
    rows, skipped = read_all(files)
    plans = memory_fit_plans()
    found = {}
    for source in sorted({row.source for row in rows if says_memory(row)}):
        if only and source not in only:
            continue
        own = [file for file in files if any(row.file in file for row in rows if row.source == source)]
        constants = memory_without(plans, rows, source)
        found[source] = unseen_memory(source, read_all(own, load=loader_with(constants))[0])
    return found, skipped


def show(found: dict[str, UnseenMemory]) -> None:
    """Print tables for people, and the medians over sources."""
    out = console()
    if not out.is_terminal:
        out.width = WIDTH
    columns: tuple[str, ...] = ("source", "peaks", "median %", "mean %", "p90 %", "bias %", "in range %")
    columns += ("rows", "OOM rows", "precision", "recall")
    lines: list[tuple[str, ...]] = [
        (
            source,
            *_figures(one.memory),
            str(len(one.rows)),
            str(one.oom.n),
            *(_shown(share, 3) for share in (one.oom.precision_fits, one.oom.recall_fits)),
        )
        for source, one in found.items()
    ]
    out.print(table(columns, lines, left=("source",)))
    out.print()
    headings = ("source", "engine, kind of peak", *columns[1:7])
    kinds: list[tuple[str, ...]] = [
        (source, name, *_figures(peak))
        for source, one in found.items()
        for name, peak in one.memory.engines.items()
    ]
    out.print(table(headings, kinds, left=("source", "engine, kind of peak")))
    medians = [one.memory.median_ape for one in found.values() if one.memory.median_ape is not None]
    means = [one.memory.mean_ape for one in found.values() if one.memory.mean_ape is not None]
    out.print()
    if medians:
        out.print(
            f"Median over {len(medians)} sources with peaks: of the median error {np.median(medians):.1f} %, "
            f"of the mean error {np.median(means):.1f} %."
        )
    if whole := _all_rows(found):
        out.print(
            f"Of the {whole.n} rows that ran out of memory and those that ran beside them: precision "
            f"{whole.precision_fits:.3f}, recall {whole.recall_fits:.3f}."
        )


def _all_rows(found: dict[str, UnseenMemory]) -> Any:
    """The OOM score of the rows of all sources in which some ran out of memory."""
    some = [one for one in found.values() if one.oom.n]
    if not some:
        return None
    fits = np.concatenate([one.predictions.fits for one in some])
    ran = np.array([not row.oom for one in some for row in one.rows], dtype=bool)
    return oom_score(fits, ran)


def _figures(peak: PeakError) -> tuple[str, ...]:
    values = (peak.median_ape, peak.mean_ape, peak.p90_ape, peak.bias, peak.coverage_80)
    return str(peak.n), *(_shown(value, 1) for value in values)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def as_json(found: dict[str, UnseenMemory]) -> dict[str, Any]:
    """The figures of each source by name."""
    return {
        source: {"memory": dataclasses.asdict(one.memory), "oom": dataclasses.asdict(one.oom)}
        for source, one in found.items()
    }


def main() -> None:
    """Print the errors of the sources in the files of the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.unseen_memory",
        description="Errors of memory on each source of measurements by constants that have not seen it.",
    )
    parser.add_argument("--rows", nargs="+", required=True, metavar="FILE", help="CSV files of measurements")
    parser.add_argument("--only", action="append", metavar="SOURCE", help="leave out these alone")
    parser.add_argument("--skipped", action="store_true", help="name rows that are skipped, and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="set the ranges of calibrated_memory.yaml by it")
    given = parser.parse_args()
    try:
        found, skipped = unseen_memories(given.rows, given.only)
    except InputError as error:
        print(f"benchmarks.unseen_memory: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    if given.skipped:
        tell_skipped(skipped)
    if given.json:
        print(json.dumps({"sources": as_json(found)}, indent=2, allow_nan=False))
    else:
        show(found)
    if given.write:
        entries: dict[str, Any] = dict(catalogue_file("calibrated_memory.yaml")["engines"])
        for engine, width in memory_spreads(list(found.values())).items():
            if any(name.startswith("memory_range.") for name in entries.get(engine, {}).get("constants", {})):
                continue
            entry = entries.get(engine, {"sources": [], "rows": 0, "constants": {}})
            entries[engine] = {**entry, "constants": {**entry["constants"], "memory_spread": width}}
        write_memory(entries)


if __name__ == "__main__":
    with while_read():
        main()
