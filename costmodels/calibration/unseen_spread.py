"""Ranges by how wrong the model is on sources that its constants have not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.calibration.priors import round_constants, scipy_optimize
from costmodels.calibration.unseen_sources import UnseenSource
from costmodels.pricing import Prices, price
from costmodels.spec.engine import Spread
from costmodels.spec.table import Floats, LayoutTable
from costmodels.time.uncertainty import spread

COVERAGE = 0.84
"""Share of the rows which the range covers, each weighed by the root of how many its source has."""

FITTED = ("base", "narrow", "experts", "network", "bubble")
"""Fields of `Spread` that are found here."""

PULL = 1e-4

STARTS = {"base": 0.08, "narrow": 0.05, "experts": 0.2, "network": 0.03, "bubble": 0.05}

LEAST, FEW = 0.015, 0.15
"""Width that is left however near all rows are, and what is added to it for one row, half for two, ..."""

UNSEEN_EXPERTS = 0.35
"""Width of models with experts on an engine and architecture that was seen with dense ones alone."""

LARGEST = 1.5
"""Logarithm beyond which a row speaks of something that no range should hold."""


class _Row(NamedTuple):
    missed: float
    weight: float
    prices: Prices
    hidden: int
    experts: bool
    blanks: float


def spreads(found: Sequence[UnseenSource]) -> dict[tuple[str, str], dict[str, float]]:
    """Fields of `Spread` for each engine and architecture that `found` has rows of.

    Quantile regression (Koenker and Bassett 1978) of the absolute errors on the width of the range. Rows of
    one source are alike: all of them weigh as the root of their number, against those of other sources.
    """
    groups: defaultdict[tuple[str, str], list[_Row]] = defaultdict(list)
    for one in found:
        errors = one.errors
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for row in one.rows:
            counts[row.engine.name, row.cluster.device.architecture] += 1
        blanks = one.predictions.blanks.tolist()
        for row, missed, blank in zip(one.rows, errors.tolist(), blanks, strict=True):
            if np.isfinite(missed):
                key = row.engine.name, row.cluster.device.architecture
                table = LayoutTable.of([row.layouts[0]])
                prices = price(row.model, row.cluster, row.engine, table)
                experts = row.model.experts > 0
                hidden = row.model.hidden
                groups[key].append(_Row(abs(missed), counts[key] ** -0.5, prices, hidden, experts, blank))
    return {key: _fields(rows) for key, rows in sorted(groups.items())}


def _shown(rows: list[_Row]) -> list[str]:
    """Fields that the rows tell anything of; the others keep their defaults, which are wide."""
    missing = {
        "experts": not any(row.experts for row in rows),
        "network": not any(row.prices.cluster.nodes > 1 for row in rows),
        "bubble": not any((row.prices.table.pipeline_parallel > 1).any() for row in rows),
    }
    return [name for name in FITTED if not missing.get(name)]


def _fields(rows: list[_Row]) -> dict[str, float]:
    minimize = scipy_optimize().minimize
    names = _shown(rows)
    missed = np.array([min(row.missed, LARGEST) for row in rows])
    weight = np.array([row.weight for row in rows])
    start = np.log([STARTS[name] for name in names])

    def widths(values: Floats) -> Floats:
        chosen = Spread(**dict(zip(names, np.exp(values).tolist(), strict=True)), launch=0.1)
        return np.array([_width(row, chosen) for row in rows])

    def loss(values: Floats) -> float:
        over = missed - widths(values)
        pinball = weight * np.maximum(COVERAGE * over, (COVERAGE - 1) * over)
        return float(pinball.sum() / weight.sum() + PULL * np.square(values - start).mean())

    best = np.exp(minimize(loss, start, method="Nelder-Mead", options={"maxiter": 400, "xatol": 1e-2}).x)
    found = dict(zip(names, best.tolist(), strict=True))
    for name, count in (
        ("base", sum(not row.experts for row in rows)),
        ("experts", sum(row.experts for row in rows)),
    ):
        if name in found:
            found[name] = max(found[name], LEAST + FEW / max(count, 1))
    if "experts" not in found:
        found["experts"] = max(found["base"], UNSEEN_EXPERTS)
    return {**round_constants(found, 3), "launch": 0.1}


def _width(row: _Row, chosen: Spread) -> float:
    engine = row.prices.engine.model_copy(update={"spread": chosen})
    time, seconds = row.prices.time, row.prices.step_time_s
    found = spread(row.prices.cluster, engine, time, seconds, hidden=row.hidden, experts=row.experts)
    return float(np.hypot(found[0], row.blanks))
