"""The first plans of a ranking, whose pipelines are simulated.

Closed forms rank all layouts. Those at the top are put in the order of their simulated pipelines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, price
from costmodels.spec.table import Floats, Ints, LayoutTable, combined_key
from costmodels.time.simulation import STEADY_BATCHES
from planner.objective import SCORE_DIGITS, Objective, logarithms
from planner.ranking.contenders import Tail
from planner.solve.concatenation import concatenate_prices

FEWEST, MOST = 10, 20
"""Plans at the top of the ranking whose pipelines are simulated, however long they take, and at most."""

MOST_PASSES = 20_000
"""Passes of the pipelines after the first `FEWEST` that are simulated."""

SHOWN = 10
"""Plans that are shown unless more are asked for."""


@dataclass(frozen=True)
class Ranking:
    """Plans that fit, in their order."""

    objective: Objective
    prices: Prices
    """The prices of the layouts that fit; those of the first places with simulated pipelines."""
    places: Ints
    """Rows of `prices`, best first."""
    tail: Tail | None = None
    """What lies behind all places."""

    def __len__(self) -> int:
        return len(self.places) + (0 if self.tail is None else len(self.tail))

    def reaching(self, count: int) -> Ranking:
        """The ranking with `count` places at least, as far as there are so many."""
        if self.tail is None or count <= len(self.places):
            return self
        prices, table = self.prices, self.tail.table.take(self.tail.rows)
        behind = price(prices.model, prices.cluster, prices.engine, table)
        last = order(table, np.arange(len(table)), *logarithms(self.objective, behind))
        return replace(
            self,
            prices=concatenate_prices([prices, behind]),
            places=np.concatenate([self.places, len(prices) + last]),
            tail=None,
        )


def simulated(ranking: Ranking) -> Ranking:
    """The ranking with simulated pipelines at the top, in their order."""
    ranking = ranking.reaching(MOST)
    prices, places = ranking.prices, ranking.places
    count = _count(prices.table.take(places[:MOST]))
    first = places[:count]
    new = first[~prices.simulated[first]]
    if len(new):
        prices = prices.simulate(new)
    again = order(prices.table, first, *logarithms(ranking.objective, prices.take(first)))
    return replace(ranking, prices=prices, places=np.concatenate([first[again], places[count:]]))


def _count(table: LayoutTable) -> int:
    """How many rows at the top of the ranking are simulated."""
    pipeline = table.pipeline_parallel
    # Long schedules are played until they are steady, which most are by then.
    played = np.minimum(table.micro_batches, 2 * STEADY_BATCHES * pipeline)
    passes = np.where(pipeline > 1, 2 * played * pipeline * table.virtual_pipeline_parallel, 0).cumsum()
    return max(min(len(table), FEWEST), int(np.searchsorted(passes, MOST_PASSES)))


def order(table: LayoutTable, rows: Ints, *scores: Floats) -> Ints:
    """Places in `rows` by their scores, logarithms of what is to be least; ties to the simplest layout."""
    table = table.take(rows)
    kinds = (
        (table.tensor_parallel > 1).astype(np.int64)
        + table.sequence_parallel
        + (table.context_parallel > 1)
        + (table.expert_parallel > 1)
        + (table.expert_tensor_parallel > 1)
        + (table.pipeline_parallel > 1)
        + (table.virtual_pipeline_parallel > 1)
        + (table.data_parallel > 1)
        + (table.zero_stage > 0)
    )
    rounded = [np.round(score, SCORE_DIGITS) for score in scores]
    ties = [
        kinds,
        table.recompute,
        table.zero_stage,
        table.virtual_pipeline_parallel,
        table.pipeline_parallel,
        table.schedule,
        table.context_parallel,
        table.context_parallel_form,
        table.expert_tensor_parallel,
        table.expert_parallel,
        table.tensor_parallel,
        table.micro_batch_size,
    ]
    return np.lexsort((combined_key(ties), *reversed(rounded)))
