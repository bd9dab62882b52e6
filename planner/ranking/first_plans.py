"""The first plans of a ranking, whose pipelines are simulated.

Closed forms rank all layouts. The plans at the top are then ordered by their simulated pipelines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, price
from costmodels.spec.table import ARRAY_FIELDS, Bools, Floats, Ints, LayoutTable, combined_key
from planner.objective import SCORE_DIGITS, Objective, logarithms
from planner.problem import Problem
from planner.ranking.contenders import Tail
from planner.solve.concatenation import concatenate_prices
from planner.solve.played_splits import has_even_stages, played_moves, played_passes

FEWEST, MOST = 10, 20
"""Least and largest number of plans at the top of the ranking whose pipelines are simulated."""

MOST_PASSES = 20_000
"""Most passes that are simulated for the pipelines after the first `FEWEST`."""

SHOWN = 10
"""Plans that are shown unless more are asked for."""


@dataclass(frozen=True)
class Ranking:
    """Plans that fit, in ranking order."""

    objective: Objective
    prices: Prices
    """The prices of the layouts that fit; those of the first places with simulated pipelines."""
    places: Ints
    """Rows of `prices`, best first."""
    tail: Tail | None = None
    """Layouts that fit and rank behind all places."""

    def __len__(self) -> int:
        return len(self.places) + (0 if self.tail is None else len(self.tail))

    def reaching(self, count: int) -> Ranking:
        """The ranking with at least `count` places, or with all if there are fewer."""
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


@dataclass(frozen=True)
class Ranked:
    """A ranking, and the legal layout of each of its rows."""

    ranking: Ranking
    rows: Ints
    """The row among the legal layouts of each row of `ranking.prices`, then of each row of its tail."""
    legal: int
    """The number of legal layouts."""
    added: tuple[Prices, ...] = ()
    """Legal layouts that were added at the end of the enumerated ones."""

    def beside(self, more: Prices) -> tuple[Ranked, Ints]:
        """The ranking with further layouts behind all its prices, and the rows of these layouts there, [n].

        Layouts that the ranking already has stay in place, and their pipelines are simulated. No further
        layout may be in the tail.
        """
        prices = self.ranking.prices
        each = (_row_of(prices.table, more.table.take(np.array([row]))) for row in range(len(more)))
        known = np.fromiter(each, dtype=np.int64)
        old = known[known >= 0]
        prices = prices.simulate(old[~prices.simulated[old]]) if len(old) else prices
        new = more.take(known < 0)
        place = len(prices)
        known[known < 0] = place + np.arange(len(new))
        if not len(new):
            return replace(self, ranking=replace(self.ranking, prices=prices)), known
        ranking = replace(
            self.ranking,
            prices=concatenate_prices([prices, new]),
            places=np.concatenate([self.ranking.places, known[known >= place]]),
        )
        legal = self.legal + len(new)
        rows = np.insert(self.rows, place, np.arange(self.legal, legal))
        return Ranked(ranking, rows, legal, (*self.added, new)), known


def _row_of(table: LayoutTable, one: LayoutTable) -> int:
    """The row of a table that equals a table of one row; -1 for none."""
    rows = np.flatnonzero(equal_but_for(("split",), one, table))
    split = one.splits[int(one.split[0])]
    return next((row for row in rows.tolist() if table.splits[int(table.split[row])] == split), -1)


def equal_but_for(names: tuple[str, ...], one: LayoutTable, table: LayoutTable) -> Bools:
    """Rows that differ from a table of one row only in the given columns, [n]; splits are not compared."""
    same = np.ones(len(table), dtype=np.bool_)
    for name in ARRAY_FIELDS:
        if name not in names and name != "split":
            same &= getattr(table, name) == getattr(one, name)
    return same


def with_moved_layers(problem: Problem, ranked: Ranked) -> Ranked:
    """The ranking after moves of layers that shorten the simulated pipelines of its first plans."""
    ranking = ranked.ranking
    if problem.objective == "memory" or not len(ranking):
        return ranked
    moved = played_moves(problem, ranking.prices.take(ranking.places[:MOST]))
    if moved is None:
        return ranked
    if ranking.tail is not None:
        # Enumerated layouts have even stages.
        moved = moved.take(~has_even_stages(moved.table))
    ranked, rows = ranked.beside(moved)
    places = ranked.ranking.places
    places = np.concatenate([rows, places[~np.isin(places, rows)]])
    return replace(ranked, ranking=simulated(replace(ranked.ranking, places=places)))


def simulated(ranking: Ranking) -> Ranking:
    """The ranking with simulated pipelines at the top, ordered by their simulated times."""
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
    """The number of rows at the top of the ranking that are simulated."""
    passes = played_passes(table).cumsum()
    return max(min(len(table), FEWEST), int(np.searchsorted(passes, MOST_PASSES)))


def order(table: LayoutTable, rows: Ints, *scores: Floats) -> Ints:
    """Places in `rows` by their scores (logarithms of the figures to minimise); among equals the simplest
    layout first."""
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
