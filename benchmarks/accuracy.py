"""How far the cost model is from published measurements, by source.

python -m benchmarks.accuracy --rows FILE... [--fit FILE...] [--held-out] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cli.tables import console, table
from costmodels.calibration.accuracy import SourceScore, is_fit_row, predict, score, time_factors
from costmodels.calibration.measurements import Measurement, read_measurements
from costmodels.errors import InputError

WIDTH = 132
"""Columns of the printed tables where there is no terminal to ask."""

HELD_OUT = "the constants were fitted on it"
"""Why `--held-out` skips a row."""


def read_all(files: Sequence[str]) -> tuple[list[Measurement], Counter[tuple[str, str]]]:
    """The usable rows of several files, and how many were skipped by (source, reason).

    Raises:
        InputError: a file cannot be read or is no table of measurements.
    """
    measurements: list[Measurement] = []
    skipped: Counter[tuple[str, str]] = Counter()
    for file in files:
        usable, unusable = read_measurements(file)
        measurements += usable
        skipped += unusable
    return measurements, skipped


def measure(
    rows: Sequence[str], fit: Sequence[str] = (), held_out: bool = False
) -> tuple[dict[str, SourceScore], dict[tuple[str, str], float]]:
    """Scores of the sources in the files `rows`, and the scalars by (engine, device) that `fit` gives.

    Args:
        fit: files on whose rows one factor of the step times of each engine and device is fitted first.
        held_out: leave out the rows that the engines' constants were fitted on.

    Raises:
        InputError: a file cannot be read or is no table of measurements.
    """
    measurements, skipped = read_all(rows)
    known = read_all(fit)[0]
    scale = time_factors(known, predict(known))
    if held_out:
        skipped.update((each.source, HELD_OUT) for each in measurements if is_fit_row(each))
        measurements = [each for each in measurements if not is_fit_row(each)]
    return score(measurements, predict(measurements, scale), skipped), scale


def report(scores: Mapping[str, SourceScore], scale: Mapping[tuple[str, str], float]) -> None:
    """Print tables for people."""
    out = console()
    if not out.is_terminal:
        out.width = WIDTH
    for (engine, device), factor in scale.items():
        out.print(f"Step times of {engine} on {device} times {factor:.4f}.")
    columns = [*("source", "n", "median %", "mean %", "p90 %", "tau", "regret %", "in range %")]
    columns += ["OOM rows", "precision", "recall", "memory rows", "median %", "p90 %"]
    rows = [
        (
            source,
            str(one.n),
            *(_shown(value, 1) for value in (one.median_ape, one.mean_ape, one.p90_ape)),
            _shown(one.kendall_tau, 2),
            *(_shown(value, 1) for value in (one.regret, one.coverage_80)),
            str(one.oom.n),
            *(_shown(value, 3) for value in (one.oom.precision_fits, one.oom.recall_fits)),
            str(one.memory.n),
            *(_shown(value, 1) for value in (one.memory.median_ape, one.memory.p90_ape)),
        )
        for source, one in scores.items()
    ]
    out.print(table(columns, rows, left=("source",)))
    kinds = [
        (source, kind, str(peak.n), _shown(peak.median_ape, 2), _shown(peak.p90_ape, 2))
        for source, one in scores.items()
        for kind, peak in one.memory.kinds.items()
    ]
    if kinds:
        out.print()
        out.print(
            table(
                ("source", "peak memory", "rows", "median %", "p90 %"), kinds, left=("source", "peak memory")
            )
        )
    reasons = [
        (source, str(count), reason)
        for source, one in scores.items()
        for reason, count in one.skipped.items()
    ]
    if reasons:
        out.print()
        out.print(table(("source", "skipped", "because"), reasons, left=("source", "because")))


def as_json(one: SourceScore) -> dict[str, Any]:
    """One source of the JSON object; kinds of peak memory where there are some."""
    fields = dataclasses.asdict(one)
    if not one.memory.kinds:
        del fields["memory"]["kinds"]
    return fields


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Score the files that the command line names."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.accuracy",
        description="Compare the cost model with published measurements: step times, ranking, memory.",
    )
    parser.add_argument(
        "--rows", nargs="+", action="extend", required=True, metavar="FILE", help="CSV files of measurements"
    )
    parser.add_argument(
        "--fit",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="CSV files whose rows fit one factor of the step times of each engine and device first",
    )
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="leave out the rows that the engines' constants were fitted on",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    try:
        scores, scale = measure(given.rows, given.fit, given.held_out)
    except InputError as error:
        print(f"benchmarks.accuracy: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    if not given.json:
        report(scores, scale)
        return
    result: dict[str, object] = {"sources": {name: as_json(one) for name, one in scores.items()}}
    if given.fit:
        result["scalars"] = {f"{engine} on {device}": factor for (engine, device), factor in scale.items()}
    print(json.dumps(result, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
