"""The first plans of a ranking: their pipelines are simulated, and they fit by their exact memory.

Closed forms rank all layouts. Those at the top are put in the order of their simulated pipelines, and of as
many as are shown the memory is exact where it is known: what does not fit by it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from costmodels.pricing import Prices
from costmodels.spec.table import Floats, Ints, LayoutTable, combined_key
from costmodels.time.simulation import STEADY_BATCHES
from planner.objective import Objective, logarithms
from planner.ranking.exact_memory import RankBytes, verify

FEWEST, MOST = 10, 20
"""Plans at the top of the ranking whose pipelines are simulated, however long they take, and at most."""

MOST_PASSES = 20_000
"""Passes of the pipelines after the first `FEWEST` that are simulated."""

SHOWN = 10
"""Plans that are shown unless more are asked for."""

EXACT_PLACES = 2
"""Plans whose memory is exact before more are asked for: the best, and what it is better than."""

AT_ONCE = 256
"""Rows whose exact memory is computed together, so that intermediate arrays stay small."""


@dataclass(frozen=True)
class Ranking:
    """Plans that fit, in their order."""

    prices: Prices
    """Of the layouts that fit by closed forms; the first ones with simulated pipelines and exact memory."""
    places: Ints
    """Rows of `prices` that fit, best first."""
    simulated: bool = False
    """The first places are in the order of their simulated pipelines."""
    exact: Mapping[int, RankBytes | None] = field(default_factory=dict)
    """Bytes of the pipeline ranks of rows of `prices`, as far as they were asked for; None if not known."""


def settle(objective: Objective, ranking: Ranking, count: int) -> Ranking:
    """`ranking` with its first `count` places settled: by exact memory and simulated pipelines.

    The first call puts the places in order; further ones only leave out what does not fit, so that the best
    plan is the same however many are shown.
    """
    if ranking.simulated:
        return _verified(ranking, count)
    if objective == "memory":
        # Exact bytes decide the order.
        count = max(count, MOST)
        ranking = _ordered(objective, _verified(ranking, count), count)
    while True:
        ranking = _played(objective, ranking)
        before, ranking = ranking, _verified(ranking, count)
        if len(ranking.places) == len(before.places):
            return ranking


def _verified(ranking: Ranking, count: int) -> Ranking:
    """Without rows of the first `count` places that do not fit by their exact memory."""
    prices, places, exact = ranking.prices, ranking.places, dict(ranking.exact)
    ahead = 0
    if all(row in exact for row in places[:count].tolist()):
        return ranking
    while any(row not in exact for row in places[:count].tolist()):
        asked = np.array([row for row in places[: count + ahead].tolist() if row not in exact][:AT_ONCE])
        prices, fits, found = verify(prices, asked)
        exact |= dict(zip(asked.tolist(), found, strict=True))
        places = places[~np.isin(places, asked[~fits])]
        # Where most do not fit, more of the others may not either.
        ahead = 2 * len(asked) if 2 * np.count_nonzero(fits) < len(asked) else 0
    return replace(ranking, prices=prices, places=places, exact=exact)


def _played(objective: Objective, ranking: Ranking) -> Ranking:
    """With simulated pipelines at the top, in their order."""
    prices, places = ranking.prices, ranking.places
    count = _count(prices.table.take(places[:MOST]))
    first = places[:count]
    new = first[~prices.simulated[first]]
    if len(new):
        prices = prices.simulate(new)
    return _ordered(objective, replace(ranking, prices=prices, simulated=True), count)


def _ordered(objective: Objective, ranking: Ranking, count: int) -> Ranking:
    """With the first `count` places in order."""
    prices, first = ranking.prices, ranking.places[:count]
    again = order(prices.table, first, *logarithms(objective, prices.take(first)))
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
    # To nine digits: rounding errors of the sums must not decide between equal layouts.
    rounded = [np.round(score, 9) for score in scores]
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
