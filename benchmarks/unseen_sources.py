"""Errors on each source of measurements by constants that have not seen it: leave one source out.

python -m benchmarks.unseen_sources --rows FILE... [--only SOURCE]... [--json] [--write]

--write sets the ranges of engines and architectures in costmodels/catalogue/calibrated.yaml so that they
cover four of five of these steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from benchmarks.accuracy import WIDTH, read_all
from benchmarks.calibrate import write_fits
from benchmarks.calibration.left_out_sources import UnseenSource, fits_without, loader, unseen_source
from benchmarks.calibration.predictions import settled_measurements
from benchmarks.calibration.time_fit import time_fit_plans
from benchmarks.calibration.unseen_spread import held_left_out, spreads
from cli.tables import console, table
from costmodels.catalogue import calibrated_fits
from costmodels.errors import InputError
from planner.options.flags import while_read


def unseen_sources(files: list[str], only: list[str] | None = None) -> dict[str, UnseenSource]:
    """Errors of every source with step times, by constants fitted without its rows."""
    rows = settled_measurements(read_all(files)[0])
    plans = time_fit_plans()
    found = {}
    for source in sorted({row.source for row in rows if row.step_time_s is not None}):
        if only is None or source in only:
            fits = fits_without(plans, rows, source)
            own = [file for file in files if any(row.file in file for row in rows if row.source == source)]
            found[source] = unseen_source(source, read_all(own, load=loader(fits))[0])
    return found


def show(found: dict[str, UnseenSource]) -> None:
    """Print a table for people, and the medians over sources."""
    out = console()
    if not out.is_terminal:
        out.width = WIDTH
    columns = (
        "source",
        "n",
        "median %",
        "mean %",
        "p90 %",
        "bias %",
        "in range %",
        "tau",
        "regret %",
        "left out %",
    )
    apart = held_left_out(found)
    shares = {source: "-" if share is None else f"{share:.0f}" for source, share in apart.items()}
    lines = [(source, *_figures(one), shares[source]) for source, one in found.items()]
    out.print(table(columns, lines, left=("source",)))
    scores = [one.score for one in found.values()]
    medians = [one.median_ape for one in scores if one.median_ape is not None]
    means = [one.mean_ape for one in scores if one.mean_ape is not None]
    held = [one.coverage_80 for one in scores if one.coverage_80 is not None]
    inside = sum(75 <= share <= 92 for share in held)
    out.print(
        f"Median over {len(medians)} sources: of the median error {np.median(medians):.1f} %, "
        f"of the mean error {np.median(means):.1f} %."
    )
    out.print(f"The range holds 75 to 92 % of the rows of {inside} of {len(held)} sources.")
    known = [share for share in apart.values() if share is not None]
    out.print(
        f"Ranges that the other sources set (left out %) hold at least 75 % of the rows of "
        f"{sum(share >= 75 for share in known)} of {len(known)} sources."
    )


def _figures(one: UnseenSource) -> tuple[str, ...]:
    score = one.score
    known = one.errors[np.isfinite(one.errors)]
    bias = 100 * float(np.expm1(np.median(known))) if len(known) else None
    values = (score.median_ape, score.mean_ape, score.p90_ape, bias, score.coverage_80)
    shown = tuple("-" if value is None else f"{value:.1f}" for value in values)
    tau = "-" if score.kendall_tau is None else f"{score.kendall_tau:.2f}"
    return str(score.n), *shown, tau, "-" if score.regret is None else f"{score.regret:.1f}"


def as_json(found: dict[str, UnseenSource]) -> dict[str, Any]:
    """The figures of each source by name."""
    return {
        source: {
            "n": one.score.n,
            "median_ape": one.score.median_ape,
            "mean_ape": one.score.mean_ape,
            "coverage_80": one.score.coverage_80,
        }
        for source, one in found.items()
    }


def main() -> None:
    """Print the errors of the sources in the files of the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.unseen_sources",
        description="Errors on each source of measurements by constants that have not seen it.",
    )
    parser.add_argument("--rows", nargs="+", required=True, metavar="FILE", help="CSV files of measurements")
    parser.add_argument("--only", action="append", metavar="SOURCE", help="leave out these alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="set the ranges of calibrated.yaml by it")
    given = parser.parse_args()
    try:
        found = unseen_sources(given.rows, given.only)
    except InputError as error:
        print(f"benchmarks.unseen_sources: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    if given.json:
        print(json.dumps({"sources": as_json(found)}, indent=2, allow_nan=False))
    else:
        show(found)
    if given.write:
        fits: dict[str, Any] = {engine: dict(each) for engine, each in calibrated_fits().items()}
        for (engine, architecture), fields in spreads(list(found.values())).items():
            entry = fits.setdefault(engine, {}).get(architecture, {"constants": {}})
            kept = {name: width for name, width in entry.get("spread", {}).items() if name == "measured"}
            fits[engine][architecture] = {**entry, "spread": {**fields, **kept}}
        write_fits(fits)


if __name__ == "__main__":
    with while_read():
        main()
