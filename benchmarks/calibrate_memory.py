"""Fit the memory constants of engines to published peaks and write them into the catalogue.

python -m benchmarks.calibrate_memory --rows FILE... [--only ENGINE]... [--write]

The fits are those of benchmarks/calibration/memory_fits.yaml. The result is
costmodels/catalogue/calibrated_memory.yaml. Only rows selected by `benchmarks.calibration.scores.is_fit_row`
are used. `python -m benchmarks.accuracy --held-out` gives the errors on the other rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

import costmodels.catalogue
from benchmarks.calibration.measurements import read_measurements
from benchmarks.calibration.memory_fit import fit_memory, has_memory, memory_fit_plans
from benchmarks.calibration.scores import is_fit_row
from costmodels.catalogue.yaml_files import catalogue_file
from costmodels.errors import InputError

TARGET = Path(costmodels.catalogue.__file__).with_name("calibrated_memory.yaml")

HEADER = """\
# Memory constants fitted to published peaks; not to be edited by hand, but written by
#   python -m benchmarks.calibrate_memory --rows FILE... --write
# Priors of each fit are in benchmarks/calibration/memory_fits.yaml; it sees half of the rows of its sources.
# Ranges of the bundled engine's memory (memory_range) follow errors in benchmarks/results/closed_memory.txt;
# python -m benchmarks.closed_memory --write fits them to dry runs. Ranges of other engines (memory_spread)
# hold four of five peaks of unseen sources: python -m benchmarks.unseen_memory --rows FILE... --write
"""


def main() -> None:
    """Fit, print and, where asked to, write."""
    parser = argparse.ArgumentParser(description="Fit the memory constants of engines to measured peaks.")
    parser.add_argument("--rows", nargs="+", required=True, metavar="FILE", help="CSV files of measurements")
    parser.add_argument("--only", action="append", metavar="ENGINE", help="fit these alone")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    arguments = parser.parse_args()
    try:
        _run(arguments.rows, arguments.only, arguments.write)
    except InputError as error:
        parser.error(str(error))


def _run(files: list[str], only: list[str] | None, write: bool) -> None:
    plans = {plan.engine: plan for plan in memory_fit_plans()}
    for name in only or ():
        if name not in plans:
            raise InputError(f"--only {name}: no such fit; memory_fits.yaml lists {', '.join(plans)}")
    rows = [row for file in files for row in read_measurements(file)[0] if is_fit_row(row)]
    entries: dict[str, Any] = dict(catalogue_file(TARGET.name)["engines"])
    for name, plan in plans.items():
        if only is not None and name not in only:
            continue
        found = fit_memory(plan, [row for row in rows if has_memory(row, plan)])
        known = entries.get(name, {}).get("constants", {})
        kept = {each: value for each, value in known.items() if each == "memory_spread"}
        constants = {**kept, **found.constants}
        entries[name] = {"sources": list(plan.sources), "rows": found.rows, "constants": constants}
        print(f"{name}: {found.rows} rows, {found.constants}")
    if write:
        write_memory(entries)
        print(f"wrote {TARGET}")


def write_memory(entries: dict[str, Any]) -> None:
    """Write the constants of engines into the catalogue."""
    TARGET.write_text(HEADER + yaml.safe_dump({"engines": entries}, width=110), encoding="utf-8")


if __name__ == "__main__":
    main()
