"""The share of estimates in the right order: pairs of measured steps that differ in their layouts alone.

python -m benchmarks.order --rows FILE... [--json] [--write]

The constants of the engines and the widths of `costmodels.order` are fitted without the source of a pair
(leave one source out). --write fits the widths to all pairs and writes costmodels/catalogue/order.yaml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import costmodels.catalogue
from benchmarks.accuracy import WIDTH, read_all
from benchmarks.calibration.left_out_sources import fits_without, loader
from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.order_fit import Pairs, fitted_widths, joined, pairs_of, unseen_chances
from benchmarks.calibration.predictions import settled_measurements
from benchmarks.calibration.time_fit import time_fit_plans
from cli.tables import console, table
from costmodels.errors import InputError
from costmodels.order import KINDS, RUN, OrderWidths
from costmodels.spec.table import Bools, Floats
from planner.options.flags import while_read

TARGET = Path(costmodels.catalogue.__file__).with_name("order.yaml")

HEADER = """\
# How sure the order of two estimates is (costmodels/order.py); not to be edited by hand, but written by
#   python -m benchmarks.order --rows FILE... --write
# Widths are natural logarithms: one for each doubling of a degree, or for a choice that differs. `measured`
# are the choices with which somebody has measured an engine on an architecture.
"""

NEAR = 0.2
"""Largest natural logarithm of the ratio of two predictions that count as near each other."""

CHANCES = (0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
"""Thresholds for the chance that a slower plan is really faster, the largest first."""

ENOUGH = 0.93
"""Share of the untied pairs that must be in the right order."""

TENTHS = 10


def unseen_pairs(files: list[str]) -> Pairs:
    """All pairs of the files, priced by constants that have not seen their source."""
    rows = settled_measurements(read_all(files)[0])
    plans = time_fit_plans()
    found = []
    for source in sorted({row.source for row in rows if row.step_time_s is not None}):
        load = loader(fits_without(plans, rows, source))
        own = [file for file in files if any(row.file in file for row in rows if row.source == source)]
        some = settled_measurements(read_all(own, load=load)[0])
        pairs = pairs_of(row for row in some if row.source == source)
        if pairs is not None:
            found.append(pairs)
    return joined(found)


def told_apart_at(pairs: Pairs, chances: Floats) -> float:
    """The largest of `CHANCES` below which enough pairs are in the right order."""
    for chance in CHANCES:
        told = chances < chance
        if told.any() and pairs.right[told].mean() >= ENOUGH:
            return chance
    return CHANCES[-1]


def figures(pairs: Pairs, chances: Floats, told_apart: float) -> dict[str, Any]:
    """All figures by name; shares from 0 to 1."""
    sources = np.array(pairs.source)
    told, near = chances < told_apart, pairs.predicted < NEAR
    every = np.concatenate([chances, 1.0 - chances])
    faster = np.concatenate([~pairs.right, pairs.right])
    tenth = np.minimum((every * TENTHS).astype(np.int64), TENTHS - 1)
    return {
        "told_apart_below": told_apart,
        "all": _of(pairs, told, near),
        "sources": {
            source: _of(pairs.take(sources == source), told[sources == source], near[sources == source])
            for source in sorted(set(pairs.source))
        },
        "differ_in": {
            kind: _of(pairs.take(alone), told[alone], near[alone])
            for kind, alone in _alone(pairs)
            if alone.any()
        },
        "tenths": [
            {
                "pairs": int((tenth == number).sum()),
                "printed": float(every[tenth == number].mean()),
                "measured": float(faster[tenth == number].mean()),
            }
            for number in range(TENTHS)
            if (tenth == number).any()
        ],
        "predicted": [
            {"from": low, "to": high} | _of(pairs.take(some), told[some], near[some])
            for low, high in pairwise(_BOUNDS)
            if (some := (pairs.predicted >= low) & (pairs.predicted < high)).any()
        ],
    }


_BOUNDS = (0.0, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, np.inf)


def _of(pairs: Pairs, told: Bools, near: Bools) -> dict[str, Any]:
    return {
        "pairs": len(pairs),
        "right": _share(pairs.right),
        "told_apart": int(told.sum()),
        "told_apart_right": _share(pairs.right[told]),
        "near_told_apart": int((told & near).sum()),
        "near_told_apart_right": _share(pairs.right[told & near]),
    }


def _share(right: Bools) -> float | None:
    return float(right.mean()) if len(right) else None


def _alone(pairs: Pairs) -> list[tuple[str, Bools]]:
    """The pairs that differ in one kind only, by its name, and those that differ in several."""
    differ = pairs.differ[[kind != RUN for kind in KINDS]] > 0
    kinds = [kind for kind in KINDS if kind != RUN]
    several = [("several", differ.sum(axis=0) > 1)]
    return [(kind, differ[row] & (differ.sum(axis=0) == 1)) for row, kind in enumerate(kinds)] + several


def show(found: dict[str, Any], known: OrderWidths) -> None:
    """Print tables for people."""
    out = console()
    if not out.is_terminal:
        out.width = WIDTH
    columns = ("", "pairs", "right %", "told apart", "right %", "within 20 %, told apart", "right %")
    parts = {"all": {"all pairs": found["all"]}, "sources": found["sources"], "differ_in": found["differ_in"]}
    parts["predicted"] = {_range(each): each for each in found["predicted"]}
    heads = {"sources": "source", "differ_in": "differ in", "predicted": "predicted slower by", "all": ""}
    for name, each in parts.items():
        lines = [(label, *_cells(one)) for label, one in each.items()]
        out.print(table((heads[name], *columns[1:]), lines, left=(heads[name],)))
        out.print()
    lines = [
        (
            f"{100 * one['printed']:.1f}",
            f"{100 * one['measured']:.1f}",
            str(one["pairs"]),
            f"{100 * (one['printed'] - one['measured']):+.1f}",
        )
        for one in found["tenths"]
    ]
    out.print(table(("chance printed %", "was faster %", "pairs", "apart"), lines))
    out.print()
    out.print(
        f"Plans are told apart where the slower one has a chance below {100 * known.told_apart:.0f} % to be "
        "the faster one."
    )
    out.print(
        "Width of each difference in %: "
        + ", ".join(f"{kind.replace('_', ' ')} {100 * width:.1f}" for kind, width in known.widths.items())
        + f"; times (half range / 10 %) ^ {known.range_power:.2f}"
    )


def _range(each: dict[str, Any]) -> str:
    low, high = (100 * np.expm1(each[end]) for end in ("from", "to"))
    return f"{low:.0f} % or more" if np.isinf(high) else f"{low:.0f} to {high:.0f} %"


def _cells(one: dict[str, Any]) -> list[str]:
    def share(name: str) -> str:
        return "-" if one[name] is None else f"{100 * one[name]:.1f}"

    return [
        f"{one['pairs']:,}",
        share("right"),
        f"{one['told_apart']:,}",
        share("told_apart_right"),
        f"{one['near_told_apart']:,}",
        share("near_told_apart_right"),
    ]


def measured_choices(rows: Sequence[Measurement]) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """The schedules, ZeRO stages and recomputation that engines were measured with, by architecture."""
    found: dict[str, dict[str, dict[str, set[Any]]]] = {}
    for row in rows:
        if row.step_time_s is None or not row.certain:
            continue
        layout = row.layouts[0]
        of_engine = found.setdefault(row.engine.name, {}).setdefault(row.cluster.device.architecture, {})
        of_engine.setdefault("recompute", set()).add(layout.recompute)
        if layout.pipeline_parallel > 1:
            of_engine.setdefault("schedule", set()).add(layout.schedule)
        if layout.data_parallel > 1:
            of_engine.setdefault("zero_stage", set()).add(layout.zero_stage)
    return {
        engine: {
            architecture: {name: sorted(values) for name, values in sorted(choices.items())}
            for architecture, choices in sorted(each.items())
        }
        for engine, each in sorted(found.items())
    }


def write(known: OrderWidths, measured: dict[str, Any]) -> None:
    """Write the widths, and the measured choices of engines, into the catalogue."""
    values = {
        "widths": dict(known.widths),
        "range_power": known.range_power,
        "told_apart": known.told_apart,
        "measured": measured,
    }
    TARGET.write_text(HEADER + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    print(f"wrote {TARGET}")


def main() -> None:
    """Print the share of pairs in the right order, for the files of the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.order", description=str(__doc__).split("\n")[0])
    parser.add_argument("--rows", nargs="+", required=True, metavar="FILE", help="CSV files of measurements")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="fit order.yaml to all pairs")
    given = parser.parse_args()
    try:
        pairs = unseen_pairs(given.rows)
        chances = unseen_chances(pairs, CHANCES[-1])
        told_apart = told_apart_at(pairs, chances)
        known = fitted_widths(pairs, told_apart)
    except InputError as error:
        print(f"benchmarks.order: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    found = figures(pairs, chances, told_apart)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        show(found, known)
    if given.write:
        write(known, measured_choices(settled_measurements(read_all(given.rows)[0])))


if __name__ == "__main__":
    with while_read():
        main()
