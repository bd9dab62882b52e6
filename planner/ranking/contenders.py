"""Which layouts are priced: those that could be among the first, by what each takes at least.

The others are ordered only where somebody looks so far down the ranking.
"""

from __future__ import annotations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, price
from costmodels.spec.table import Bools, Ints, LayoutTable
from planner.objective import SCORE_DIGITS, Objective, logarithms, slowness
from planner.problem import Problem
from planner.solve.bounds import Floor
from planner.space.grid import Space

PLACES = 128
"""Places of the ranking that are priced unless more are asked for."""

SAMPLE = 512
"""Rows with the lowest floors, whose prices tell how fast the last of `PLACES` is at most."""

FEW = 4096
"""Rows that are all priced: to choose among them takes longer."""

ROUNDING = 1e-6
"""Relative difference that hides no rounding error of sums."""


@dataclass(frozen=True)
class Tail:
    """Layouts that fit and lie behind all places of a ranking, not priced yet."""

    table: LayoutTable
    """The layouts of a space."""
    rows: Ints

    def __len__(self) -> int:
        return len(self.rows)


def contenders(problem: Problem, space: Space, rows: Ints, floor: Floor) -> Ints:
    """The rows of `rows` that could take one of the first `PLACES`, whatever their replicas exchange."""
    if problem.objective == "memory" or problem.cluster.parts or len(rows) <= FEW:
        return rows
    least = floor.of(rows)
    sample = rows[np.argpartition(least, SAMPLE)[:SAMPLE]]
    prices = price(problem.model, problem.cluster, problem.constants, space.table.take(sample))
    paces = slowness(problem.objective, prices.table.global_batch_size, prices.step_time_s)
    last = np.partition(paces, PLACES - 1)[PLACES - 1]
    found: Ints = rows[least <= last * (1 + ROUNDING)]
    return found


def first_prices(objective: Objective, prices: Prices) -> Bools:
    """Which of the contenders take the first `PLACES`, with all that are as good as the last of them, [n]."""
    if len(prices) <= PLACES:
        return np.ones(len(prices), dtype=bool)
    scores = logarithms(objective, prices)[0].round(SCORE_DIGITS)
    result: Bools = scores <= np.partition(scores, PLACES - 1)[PLACES - 1]
    return result
