"""Fit the constants of engines to published measurements and write them into the catalogue.

python -m benchmarks.calibrate --rows FILE... [--only ENGINE/ARCHITECTURE]... [--write | --cross-validate]

The fits are those of benchmarks/calibration/fits.yaml; the result is costmodels/catalogue/calibrated.yaml.
Only the rows of `benchmarks.calibration.scores.is_fit_row` are used: the other rows show the errors of the
constants. --cross-validate fits each half of the rows and prices the other with it, so that constants are
tested on rows to which they were not fitted.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import costmodels.catalogue
from benchmarks.calibration.layer_factors import fit_layers
from benchmarks.calibration.measurements import Measurement, read_measurements
from benchmarks.calibration.predictions import settled_measurements
from benchmarks.calibration.rank_correlation import rank_sweeps
from benchmarks.calibration.scores import is_fit_row, tokens_per_s_per_device
from benchmarks.calibration.time_fit import (
    TimeFit,
    TimeFitPlan,
    fit_times,
    is_row_of,
    log_errors,
    time_fit_plans,
)
from costmodels.catalogue import calibrated_fits
from costmodels.errors import InputError
from costmodels.spec.table import Floats

TARGET = Path(costmodels.catalogue.__file__).with_name("calibrated.yaml")

COVERAGE = 0.82
"""Share of the rows that the fitted range must cover."""

HEADER = """\
# Constants fitted to published measurements; not to be edited by hand, but written by
#   python -m benchmarks.calibrate --rows FILE... --write
# Priors and rows of each fit are in benchmarks/calibration/fits.yaml, its errors on unseen rows here.
"""


def _percent(logarithms: Floats) -> dict[str, float]:
    missed = 100 * np.abs(np.expm1(logarithms))
    return {
        "n": len(missed),
        "median_ape": round(float(np.median(missed)), 2),
        "mean_ape": round(float(missed.mean()), 2),
    }


def _plain(constants: dict[str, Any]) -> dict[str, Any]:
    """Constants as YAML writes them."""
    layers = constants.get("measured_layers", ())
    return {**constants, **({"measured_layers": [one.model_dump() for one in layers]} if layers else {})}


def _halves(plan: TimeFitPlan, rows: list[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """The rows of a fit in two halves: rows that the fit may use, and the others."""
    usable = [row for row in rows if is_row_of(row, plan)]
    return [row for row in usable if is_fit_row(row)], [row for row in usable if not is_fit_row(row)]


def _fit(plan: TimeFitPlan, seen: list[Measurement]) -> TimeFit:
    found = fit_times(plan, seen)
    return found.with_layers(fit_layers(found, seen)) if plan.layers else found


def cross_validate(wanted: list[TimeFitPlan], rows: list[Measurement]) -> dict[str, dict[str, float]]:
    """Errors and regret of each source in percent, every row priced by the fit of the half without it."""
    priced: list[tuple[Measurement, float]] = []
    for plan in wanted:
        for unseen, seen in itertools.permutations(_halves(plan, rows)):
            missed = log_errors(_fit(plan, seen), unseen)
            priced += zip(unseen, missed.tolist(), strict=True)
    result = {}
    for source in sorted({row.source for row, _ in priced}):
        own = [(row, missed) for row, missed in priced if row.source == source]
        speed = np.array([tokens_per_s_per_device(row) for row, _ in own])
        missed = np.array([missed for _, missed in own])
        _, regrets = rank_sweeps([row.sweep for row, _ in own], speed, speed * np.exp(-missed))
        result[source] = _percent(missed)
        if regrets:
            result[source] |= {"sweeps": len(regrets), "regret": round(100 * float(np.mean(regrets)), 2)}
    return result


def calibrate(plan: TimeFitPlan, rows: list[Measurement]) -> dict[str, Any]:
    """One entry of the catalogue: constants, range, and errors on rows that the fit did not see."""
    seen, unseen = _halves(plan, rows)
    found = fit_times(plan, seen)
    # Ranges are those of sources that no fit saw (benchmarks.unseen_sources --write).
    spread = dict(calibrated_fits().get(plan.engine, {}).get(plan.architecture, {}).get("spread", {}))
    if plan.layers:
        found = found.with_layers(fit_layers(found, seen))
        spread["measured"] = float(f"{np.quantile(np.abs(log_errors(found, seen)), COVERAGE):.3g}")
    entry = {
        "sources": list(plan.sources),
        "rows": len(seen),
        "constants": _plain(found.constants),
        "spread": spread,
    }
    if unseen:
        entry["held_out"] = _percent(log_errors(found, unseen))
    return entry


def main() -> None:
    """Fit, print and, where asked to, write."""
    parser = argparse.ArgumentParser(description="Fit the constants of engines to measured step times.")
    parser.add_argument("--rows", nargs="+", required=True, metavar="FILE", help="CSV files of measurements")
    parser.add_argument("--only", action="append", metavar="ENGINE/ARCHITECTURE", help="fit these alone")
    result = parser.add_mutually_exclusive_group()
    result.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    result.add_argument(
        "--cross-validate", action="store_true", help="price each half of the rows by the other"
    )
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except InputError as error:
        parser.error(str(error))


def _run(arguments: argparse.Namespace) -> None:
    only = arguments.only
    named = {f"{plan.engine}/{plan.architecture}": plan for plan in time_fit_plans()}
    for name in only or ():
        if name not in named:
            raise InputError(f"--only {name}: no such fit; fits.yaml lists {', '.join(named)}")
    wanted = [plan for name, plan in named.items() if only is None or name in only]
    rows = settled_measurements([row for file in arguments.rows for row in read_measurements(file)[0]])
    if arguments.cross_validate:
        for source, found in cross_validate(wanted, rows).items():
            print(f"{source}: {found}")
        return
    entries: dict[str, Any] = {name: dict(fits) for name, fits in calibrated_fits().items()}
    for plan in wanted:
        entry = calibrate(plan, rows)
        entries.setdefault(plan.engine, {})[plan.architecture] = entry
        print(
            f"{plan.engine} on {plan.architecture}: {entry['rows']} rows, not seen: {entry.get('held_out')}"
        )
        print(f"  {entry['constants']}\n  spread {entry['spread']}")
    if arguments.write:
        write_fits(entries)


def write_fits(entries: Mapping[str, Any]) -> None:
    """Write the constants and ranges of engines by architecture into the catalogue."""
    text = yaml.safe_dump({"engines": entries}, sort_keys=True, width=110)
    TARGET.write_text(HEADER + text, encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
