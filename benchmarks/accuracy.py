"""Errors of the cost model against published measurements, by source.

python -m benchmarks.accuracy --rows FILE... [--engine ENGINE] [--fill COLUMN=VALUE]... [--fit FILE...]
    [--held-out] [--json]

Any file of measurements is read. The modules benchmarks/calibration/published_* and
benchmarks/calibration/measurements.yaml explain its columns, and the reading of devices, models and blanks.
Rows that cannot be priced are named on the error stream, one line each, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.calibration.measurements import (
    NO_TABLE,
    EngineLoader,
    Measurement,
    SkippedRow,
    named_engine,
    read_measurements,
)
from benchmarks.calibration.predictions import predict
from benchmarks.calibration.scores import SourceScore, is_fit_row, score, time_factors
from cli.tables import console, table
from costmodels.catalogue import load_engine
from costmodels.errors import InputError
from planner.options.flags import while_read

WIDTH = 132
"""Width of the printed tables in characters if the output is no terminal."""

HELD_OUT = "the constants were fitted on it"
"""The reason why `--held-out` skips a row."""


def read_all(
    files: Sequence[str],
    engine: str | None = None,
    fills: Mapping[str, str] | None = None,
    load: EngineLoader = named_engine,
) -> tuple[list[Measurement], list[SkippedRow]]:
    """The usable rows of several files, and those that were skipped.

    Raises:
        InputError: a file cannot be read.
    """
    measurements: list[Measurement] = []
    skipped: list[SkippedRow] = []
    for file in files:
        usable, unusable = read_measurements(file, engine, fills, load)
        measurements += usable
        skipped += unusable
    return measurements, skipped


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a run of the benchmark."""

    scores: dict[str, SourceScore]
    scale: dict[tuple[str, str], float]
    """Factors of step times by engine and device, fitted by `--fit`."""
    skipped: list[SkippedRow]
    taken: Counter[tuple[str, str]]
    """Number of rows with a filled blank, by source and by the assumption that filled it."""


def measure(
    rows: Sequence[str],
    fit: Sequence[str] = (),
    held_out: bool = False,
    engine: str | None = None,
    fills: Mapping[str, str] | None = None,
) -> Report:
    """Scores of the sources in the files `rows`.

    Args:
        fit: files on whose rows one factor of the step times of each engine and device is fitted first.
        held_out: leave out the rows that the engines' constants were fitted on.
        engine: who ran the jobs, whatever the rows say.
        fills: contents of blank cells, by column.

    Raises:
        InputError: a file cannot be read.
    """
    if engine is not None:
        load_engine(engine)
    measurements, skipped = read_all(rows, engine, fills)
    known = read_all(fit, engine, fills)[0]
    scale = time_factors(known, predict(known))
    reasons = Counter((each.source, each.reason) for each in skipped if each.reason != NO_TABLE)
    if held_out:
        reasons.update((each.source, HELD_OUT) for each in measurements if is_fit_row(each))
        measurements = [each for each in measurements if not is_fit_row(each)]
    predictions = predict(measurements, scale)
    for row, reason in predictions.refused.items():
        refused = measurements[row]
        skipped.append(SkippedRow(refused.source, reason, refused.file, refused.line))
    taken = Counter((each.source, what) for each in measurements for what in each.taken)
    return Report(score(measurements, predictions, reasons), scale, skipped, taken)


def show(report: Report) -> None:
    """Print tables for people."""
    scores = report.scores
    out = console()
    if not out.is_terminal:
        out.width = WIDTH
    for (engine, device), factor in report.scale.items():
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
        if one.n or one.oom.n or one.memory.n
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
    if report.taken:
        out.print()
        blanks = [(source, str(count), what) for (source, what), count in sorted(report.taken.items())]
        out.print(table(("source", "rows", "blank, taken for"), blanks, left=("source", "blank, taken for")))
    reasons = [
        (source, str(count), reason)
        for source, one in scores.items()
        for reason, count in one.skipped.items()
    ]
    if reasons:
        out.print()
        out.print(table(("source", "skipped", "because"), reasons, left=("source", "because")))


def tell_skipped(skipped: Sequence[SkippedRow]) -> None:
    """One line of each skipped row, on the error stream."""
    for row in skipped:
        print(f"{row.file}:{row.line}: {row.source} skipped: {' '.join(row.reason.split())}", file=sys.stderr)


def as_json(one: SourceScore) -> dict[str, Any]:
    """The JSON object of one source, with its kinds of peak memory if it has any."""
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
    parser.add_argument("--engine", metavar="ENGINE", help="who ran the jobs, whatever the rows say")
    parser.add_argument(
        "--fill",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="what blank cells of a column hold: gpu=h100, 'model_name={like: llama3-8b, layers: 16}'",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    try:
        report = measure(given.rows, given.fit, given.held_out, given.engine, _fills(given.fill))
    except InputError as error:
        print(f"benchmarks.accuracy: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    tell_skipped(report.skipped)
    if not given.json:
        show(report)
        return
    result: dict[str, object] = {"sources": {name: as_json(one) for name, one in report.scores.items()}}
    if given.fit:
        factors = {f"{engine} on {device}": factor for (engine, device), factor in report.scale.items()}
        result["scalars"] = factors
    print(json.dumps(result, indent=2, allow_nan=False))


def _fills(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in given:
        column, equals, value = each.partition("=")
        if not equals or not column.strip() or not value.strip():
            raise InputError(f"--fill {each}: expected COLUMN=VALUE, such as gpu=h100")
        found[column.strip()] = value.strip()
    return found


if __name__ == "__main__":
    with while_read():
        main()
