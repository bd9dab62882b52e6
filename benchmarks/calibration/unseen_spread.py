"""Prediction ranges, fitted to the model's errors on sources that its constants have not seen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.calibration.left_out_sources import UnseenSource
from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.priors import round_constants, scipy_optimize
from costmodels.pricing import price
from costmodels.spec.engine import Spread
from costmodels.spec.table import Floats, LayoutTable
from costmodels.time.uncertainty import causes

COVERAGE = 0.84
"""Share of the rows that the range must cover; rows are weighted by their recipe."""

STARTS = {"base": 0.08, "narrow": 0.05, "experts": 0.2, "network": 0.03, "launch": 0.3, "bubble": 0.05}
"""Fitted fields of `Spread` and their values before the fit."""

PULL = 1e-3
"""The penalty of a field whose square is twice its start's, relative to that of the errors."""

LEAST, MOST, FEW = 0.015, 1.0, 0.15
"""Least and largest width of a field. `FEW` is added to that of the whole step for one row, half of it for
two rows, and so on."""

ROUNDS = 4
"""Number of times that the regression is repeated with weights from the widths that it found."""

UNSEEN_EXPERTS = 0.9
"""Width of models with experts on an engine and architecture with measurements of dense models only.

Megatron-SWIFT's three fine-tuning jobs of Qwen3-30B-A3B and Moonlight on A100 and A800, with natural routing,
took 1.6 to 2.5 times the estimate, which is 0.50 to 0.90.
"""

UNSEEN = {
    "base": 0.3,
    "experts": UNSEEN_EXPERTS,
    **{name: getattr(Spread(), name) for name in ("network", "launch", "bubble")},
}
"""Widths of each cause on an engine and architecture without measurements."""

POOL = 1.0
"""Total weight of the recipes of all other engines and architectures, in recipes of the fitted one.

A few recipes show little about other clusters, releases and readers. So the range of an engine with few
recipes is close to the range of all engines, separately for dense models and models with experts."""

LARGEST = 1.5
"""Largest logarithm of an error that a range should cover; rows beyond it are left out."""


class _Row(NamedTuple):
    missed: float
    """Distance of the prediction, as a natural logarithm."""
    weight: float
    experts: bool
    blanks: float
    """Width that comes from blanks of the row."""
    of_one: dict[str, float]
    """Width of the row for each field, if that field were 1 (`costmodels.time.uncertainty.causes`)."""
    nodes: int
    pipelined: bool


Key = tuple[str, str]
"""An engine and an architecture."""


def spreads(found: Sequence[UnseenSource]) -> dict[Key, dict[str, float]]:
    """Fields of `Spread` for each engine and architecture that `found` has rows of.

    Errors of one recipe (the same model, number format and device) are similar at all scales and in all
    layouts. Therefore such rows of a source weigh as much as one row. Rows with a ZeRO stage that the
    engine's plans never use are left out. A regression fits the width of each cause. Then the width of the
    whole step is chosen so that ranges cover `COVERAGE` of the rows (`weighted_quantile`).
    """
    groups: defaultdict[Key, list[_Row]] = defaultdict(list)
    for one in found:
        for key, row in _rows(one):
            groups[key].append(row)
    return {key: _fields(rows, _without(groups, key)) for key, rows in sorted(groups.items())}


def _without(groups: Mapping[Key, list[_Row]], key: Key) -> list[_Row]:
    """The rows of all engines and architectures but one."""
    return [row for other, rows in groups.items() if other != key for row in rows]


def held_left_out(found: Mapping[str, UnseenSource]) -> dict[str, float | None]:
    """Percent of each source's rows that lie in ranges fitted to the other sources.

    If no other source has the same engine and architecture, the range has the widths of `UNSEEN`.
    """
    rows = {name: _rows(one) for name, one in found.items()}
    held: dict[str, float | None] = {}
    for name, own in rows.items():
        others: defaultdict[Key, list[_Row]] = defaultdict(list)
        for other, theirs in rows.items():
            for key, row in theirs if other != name else ():
                others[key].append(row)
        kinds = {key for key, _ in own}
        widths = {
            key: _fields(others[key], _without(others, key)) if key in others else UNSEEN for key in kinds
        }
        inside = [row.missed <= _width(row, widths[key]) for key, row in own]
        held[name] = 100 * float(np.mean(inside)) if inside else None
    return held


def _width(row: _Row, fields: Mapping[str, float]) -> float:
    """Half the width of a row's range, as a natural logarithm."""
    whole = fields["experts"] if row.experts else fields.get("base", UNSEEN["base"])
    usual = {**STARTS, **fields}
    others = (row.of_one.get(name, 0.0) * usual[name] for name in ("narrow", "network", "launch", "bubble"))
    return math.sqrt(row.blanks**2 + whole**2 + sum(part**2 for part in others))


def _rows(one: UnseenSource) -> list[tuple[Key, _Row]]:
    """The rows of a source that count, each with its engine and architecture."""
    planned = [row.layouts[0].zero_stage in row.engine.runs.zero_stages for row in one.rows]
    counted = np.flatnonzero(np.isfinite(one.errors) & planned)
    kinds = [_kind(one.rows[place]) for place in counted]
    recipes: defaultdict[tuple[str, str, bool], set[tuple[str, str, str]]] = defaultdict(set)
    for kind, place in zip(kinds, counted, strict=True):
        row = one.rows[place]
        recipes[kind].add((row.model.name, row.cluster.device.name, row.layouts[0].precision))
    found = []
    for kind, place in zip(kinds, counted, strict=True):
        weight = len(recipes[kind]) / kinds.count(kind)
        missed, blanks = abs(float(one.errors[place])), float(one.predictions.blanks[place])
        found.append((kind[:2], _row(one.rows[place], missed, weight, blanks)))
    return found


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """Value below which `share` of the weights lie, each counted half below its own value.

    Between two values it is interpolated (Hazen 1914; the fifth of Hyndman and Fan 1996, with weights), so
    that of few rows it need not be the largest.
    """
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share, below / weights.sum(), values[order]))


def _kind(row: Measurement) -> tuple[str, str, bool]:
    return row.engine.name, row.cluster.device.architecture, row.model.experts > 0


def _row(row: Measurement, missed: float, weight: float, blanks: float) -> _Row:
    table, experts = LayoutTable.of([row.layouts[0]]), row.model.experts > 0
    prices = price(row.model, row.cluster, row.engine, table)
    engine = prices.engine.model_copy(update={"spread": Spread(**dict.fromkeys(STARTS, 1.0))})
    found = causes(row.cluster, engine, prices.time, prices.step_time_s, row.model.hidden, experts)
    of_one = {name: float(each[0]) for name, each in found.items()}
    pipelined = row.layouts[0].pipeline_parallel > 1
    return _Row(min(missed, LARGEST), weight, experts, blanks, of_one, row.cluster.nodes, pipelined)


def _shown(rows: list[_Row]) -> list[str]:
    """Fields to which the rows can be fitted; the others keep their wide defaults."""
    missing = {
        "base": all(row.experts for row in rows),
        "experts": not any(row.experts for row in rows),
        "network": all(row.nodes == 1 for row in rows),
        "bubble": not any(row.pipelined for row in rows),
    }
    return [name for name in STARTS if not missing.get(name)]


def _fields(rows: list[_Row], elsewhere: list[_Row]) -> dict[str, float]:
    """Fields of `Spread`, fitted to the rows of one engine and architecture and to the pool of all others."""
    names = _shown(rows)
    weights = np.array([row.weight for row in rows])
    experts = np.array([row.experts for row in rows])
    rest = np.array([row.missed**2 - row.blanks**2 for row in rows])
    squares = {name: np.array([row.of_one.get(name, 1.0) ** 2 for row in rows]) for name in STARTS}
    # The width of the whole step is that of its kind.
    squares["base"], squares["experts"] = (~experts).astype(float), experts.astype(float)
    columns = np.stack([squares[name] for name in names], axis=1)
    rest = rest - sum(STARTS[name] ** 2 * squares[name] for name in STARTS if name not in names)
    starts = np.array([STARTS[name] for name in names]) ** 2
    values = starts
    for _ in range(ROUNDS):
        # Squares of wide ranges would count for more than their part.
        values = _regression(columns, rest, weights / np.sqrt(columns @ values), starts)
    found = dict(zip(names, np.sqrt(values).tolist(), strict=True))
    whole = np.isin(names, ("base", "experts"))
    needed = np.sqrt(np.maximum(rest - columns[:, ~whole] @ values[~whole], 0.0))
    for name, own in (("base", ~experts), ("experts", experts)):
        if own.any():
            least = LEAST + FEW / int(own.sum())
            alone = weighted_quantile(needed[own], weights[own], COVERAGE)
            values, shares = _pool([row for row in elsewhere if row.experts == (name == "experts")])
            both = np.concatenate([needed[own], values]), np.concatenate([weights[own], shares])
            found[name] = max(alone, weighted_quantile(*both, COVERAGE), least)
    if "experts" not in found:
        found["experts"] = max(found["base"], UNSEEN_EXPERTS)
    return round_constants(found, 3)


def _pool(rows: list[_Row]) -> tuple[Floats, Floats]:
    """Widths of the whole step that rows need, and their weights, which add up to `POOL`."""
    usual = {name: width for name, width in STARTS.items() if name not in ("base", "experts")}
    others = [sum((row.of_one.get(name, 0.0) * usual[name]) ** 2 for name in usual) for row in rows]
    rest = [row.missed**2 - row.blanks**2 - part for row, part in zip(rows, others, strict=True)]
    weights = np.array([row.weight for row in rows])
    return np.sqrt(np.maximum(rest, 0.0)), POOL * weights / max(float(weights.sum()), 1e-9)


def _regression(columns: Floats, values: Floats, weights: Floats, starts: Floats) -> Floats:
    """Factors of `columns`, [n, k], whose sums lie above `COVERAGE` of `values`, [n].

    Quantile regression (Koenker and Bassett 1978), solved as a linear program, whose optimum does not depend
    on the solver.

    Args:
        starts: factors before the fit, [k].
    """
    count, kinds = columns.shape
    weights = weights / weights.sum()
    pull = PULL * float(weights @ np.abs(values)) / (kinds * starts)
    # columns x factors + above - below = values;  factors - more + less = starts
    cost = np.concatenate([np.zeros(kinds), COVERAGE * weights, (1 - COVERAGE) * weights, pull, pull])
    each, none, own = np.eye(count), np.zeros((count, 2 * kinds)), np.eye(kinds)
    equal = np.block([[columns, each, -each, none], [own, np.zeros((kinds, 2 * count)), -own, own]])
    bounds = [(LEAST**2, MOST**2)] * kinds + [(0, None)] * (2 * (count + kinds))
    found = scipy_optimize().linprog(cost, A_eq=equal, b_eq=[*values, *starts], bounds=bounds)
    result: Floats = found.x[:kinds]
    return result
