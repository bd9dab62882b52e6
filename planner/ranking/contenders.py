"""The layouts to price: those that could be among the first, by a lower bound of their step time.

The other layouts are ordered only when a place so far down the ranking is asked for.
"""

from __future__ import annotations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, price
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from planner.objective import SCORE_DIGITS, Objective, logarithms, slowness
from planner.problem import Problem
from planner.solve.bounds import Floor
from planner.solve.chunk_splits import NEAR, ROWS, has_movable_layers
from planner.solve.concatenation import concatenate_prices
from planner.solve.solutions import FIRST
from planner.space.grid import Space

PLACES = 128
"""Places of the ranking that are priced unless more are asked for."""

SAMPLE = 2048
"""Number of rows with the lowest floors that are priced first; each further round doubles the priced rows."""

FEW = 4096
"""Number of rows up to which all are priced, as choosing among them takes longer."""

ROUNDING = 1e-6
"""Relative difference that is larger than any rounding error of sums."""


@dataclass(frozen=True)
class Tail:
    """Layouts that fit and rank behind all places of a ranking; they are not priced yet."""

    table: LayoutTable
    """The layouts of a space."""
    rows: Ints

    def __len__(self) -> int:
        return len(self.rows)


def contenders(problem: Problem, space: Space, rows: Ints, floor: Floor) -> tuple[Ints, Prices]:
    """The rows of `rows` that could take one of the first `PLACES`, whatever their replicas exchange, and the
    prices of these rows.

    Rows with the lowest floors are priced first, in growing rounds, until the floors of all others are above
    the last place.
    """
    where = problem.model, problem.cluster, problem.constants
    if problem.objective == "memory" or problem.cluster.parts or len(rows) <= FEW:
        return rows, price(*where, space.table.take(rows))
    left, least = rows, floor.of(rows)
    found, parts, paces, movable = [], [], np.zeros(0), np.zeros(0, dtype=np.bool_)
    while len(left):
        some = _lowest(least, max(SAMPLE, len(paces)))
        found.append(left[some])
        parts.append(price(*where, space.table.take(found[-1])))
        table = parts[-1].table
        own = slowness(problem.objective, table.global_batch_size, parts[-1].step_time_s)
        paces = np.concatenate([paces, own])
        movable = np.concatenate([movable, has_movable_layers(problem, table)])
        keep = ~some & (least <= _bound(paces, movable))
        left, least = left[keep], least[keep]
    every = np.concatenate(found)
    order = np.argsort(every)
    return every[order], concatenate_prices(parts).take(order)


def _lowest(least: Floats, count: int) -> Bools:
    """The rows with the `count` lowest floors, [n]."""
    result = np.zeros(len(least), dtype=np.bool_)
    result[np.argpartition(least, count)[:count] if count < len(least) else slice(None)] = True
    return result


def _bound(paces: Floats, movable: Bools) -> float:
    """The highest floor with which a row could be among the first `PLACES`, also after its layers are moved.

    Args:
        paces: paces of the rows that are priced, [n].
        movable: rows whose layers can be moved, [n].
    """
    last = _place(paces, PLACES)
    moved = min(NEAR * _place(paces, FIRST), _place(paces[movable], ROWS))
    return max(last, moved) * (1 + ROUNDING)


def _place(paces: Floats, place: int) -> float:
    """The pace at a place, from 1; infinite where there are fewer places."""
    return float(np.partition(paces, place - 1)[place - 1]) if len(paces) >= place else np.inf


def first_prices(objective: Objective, prices: Prices) -> Bools:
    """The contenders that take the first `PLACES`, and all that equal the last of them, [n]."""
    if len(prices) <= PLACES:
        return np.ones(len(prices), dtype=bool)
    scores = logarithms(objective, prices)[0].round(SCORE_DIGITS)
    result: Bools = scores <= np.partition(scores, PLACES - 1)[PLACES - 1]
    return result
