"""The first plans of a ranking: their pipelines are simulated, and they fit by their exact memory.

Closed forms rank all layouts. Those at the top are put in the order of their simulated pipelines, and of as
many as are shown the memory is exact where it is known: what does not fit by it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, price
from costmodels.spec.table import ARRAY_FIELDS, Floats, Ints, LayoutTable, combined_key
from costmodels.time.simulation import STEADY_BATCHES
from planner.objective import SCORE_DIGITS, Objective, logarithms
from planner.ranking.contenders import Tail
from planner.ranking.exact_memory import RankBytes, verify
from planner.ranking.twins import FORMS
from planner.solve.concatenation import concatenate_prices

FEWEST, MOST = 10, 20
"""Plans at the top of the ranking whose pipelines are simulated, however long they take, and at most."""

MOST_PASSES = 20_000
"""Passes of the pipelines after the first `FEWEST` that are simulated."""

SHOWN = 10
"""Plans that are shown unless more are asked for."""

EXACT_PLACES = 2
"""Plans whose memory is exact before more are asked for: the best, and what it is better than."""

CLEAR = 0.5
"""Share of a device's memory up to which closed forms say for sure that a plan fits. Of 87 layouts of three
models that were drawn below it, exact bytes were 1.35 times as many at most."""

AT_ONCE = 256
"""Rows whose exact memory is computed together, so that intermediate arrays stay small."""


@dataclass(frozen=True)
class Ranking:
    """Plans that fit, in their order."""

    objective: Objective
    prices: Prices
    """Of the layouts that fit by closed forms; the first ones with simulated pipelines and exact memory."""
    places: Ints
    """Rows of `prices` that fit, best first."""
    simulated: bool = False
    """The first places are in the order of their simulated pipelines."""
    exact: Mapping[int, RankBytes | None] = field(default_factory=dict)
    """Bytes of the pipeline ranks of rows of `prices`, as far as they were asked for; None if not known."""
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


def settle(ranking: Ranking, count: int, shows_bytes: bool = True) -> Ranking:
    """`ranking` with its first `count` places settled: by exact memory and simulated pipelines.

    The first call puts the places in order; further ones only leave out what does not fit, so that the best
    plan is the same however many are shown. These compute no exact bytes without `shows_bytes` where closed
    forms leave no doubt.
    """
    if ranking.simulated:
        return _verified(ranking if shows_bytes else _with_clear_places(ranking, count), count)
    if ranking.objective == "memory":
        # Exact bytes decide the order.
        count = max(count, MOST)
        ranking = _ordered(_verified(ranking, count), count)
    while True:
        ranking = _played(ranking)
        before, ranking = ranking, _verified(ranking, count)
        if len(ranking) == len(before):
            return ranking


def _verified(ranking: Ranking, count: int) -> Ranking:
    """Without rows of the first `count` places that do not fit by their exact memory."""
    ahead = 0
    while True:
        ranking = ranking.reaching(count)
        if all(row in ranking.exact for row in ranking.places[:count].tolist()):
            return ranking
        ranking = ranking.reaching(count + ahead)
        new = [row for row in ranking.places[: count + ahead].tolist() if row not in ranking.exact]
        some = np.array(new[:AT_ONCE])
        prices, fits, found = verify(ranking.prices, some)
        ranking = replace(
            ranking,
            prices=prices,
            places=ranking.places[~np.isin(ranking.places, some[~fits])],
            exact={**ranking.exact, **dict(zip(some.tolist(), found, strict=True))},
        )
        # Where most do not fit, more of the others may not either.
        ahead = 2 * len(some) if 2 * np.count_nonzero(fits) < len(some) else 0


def _with_clear_places(ranking: Ranking, count: int) -> Ranking:
    """With those of the first `count` places verified that fit for sure, and are like no other in all but
    form: whether such are twins, exact bytes decide."""
    ranking = ranking.reaching(count)
    prices, places = ranking.prices, ranking.places[:count]
    if prices.cluster.parts or ranking.objective == "memory":
        return ranking
    table = prices.table.take(places)
    columns = [getattr(table, name) for name in ARRAY_FIELDS if name not in FORMS]
    _, kind, alike = np.unique(combined_key(columns), return_inverse=True, return_counts=True)
    small = prices.peak_memory_bytes[places] <= CLEAR * prices.cluster.memory_bytes
    clear = places[small & (alike[kind] == 1)].tolist()
    return replace(ranking, exact={**dict.fromkeys(clear), **ranking.exact})


def _played(ranking: Ranking) -> Ranking:
    """With simulated pipelines at the top, in their order."""
    ranking = ranking.reaching(MOST)
    prices, places = ranking.prices, ranking.places
    count = _count(prices.table.take(places[:MOST]))
    first = places[:count]
    new = first[~prices.simulated[first]]
    if len(new):
        prices = prices.simulate(new)
    return _ordered(replace(ranking, prices=prices, simulated=True), count)


def _ordered(ranking: Ranking, count: int) -> Ranking:
    """With the first `count` places in order."""
    prices, first = ranking.prices, ranking.places[:count]
    again = order(prices.table, first, *logarithms(ranking.objective, prices.take(first)))
    return replace(ranking, places=np.concatenate([first[again], ranking.places[count:]]))


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
