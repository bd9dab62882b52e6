"""The choice of the first plan: the simplest one within the estimate's error of the fastest.

Plans that leave the wanted headroom come before all others. Three quantities follow from a layout's degrees,
so they are computed for all layouts at once: points of complexity (`planner.preference`), bytes, and the
largest lag with which it could tie with the fastest plan. Only a few of the possible first plans are priced,
from the simplest on, until one ties with the fastest.

The more two layouts differ, the less sure is their order. So one layout may tie with the fastest, while a
simpler one of the same speed, which differs less, does not. Therefore all layouts as fast as the chosen one
are compared again, and the simplest of these is first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.order import apart_at, differences, order_width, order_widths, widths_of
from costmodels.pricing import Prices, price
from costmodels.spec.table import ARRAY_FIELDS, SCHEDULES, Bools, Floats, Ints, LayoutTable
from planner.objective import logarithms, slowness
from planner.problem import Problem
from planner.ranking.complexity import points_of
from planner.ranking.contenders import Tail
from planner.ranking.first_plans import Ranked, Ranking, equal_but_for
from planner.ranking.twins import FORMS, SAME
from planner.solve.bounds import Floor, Worth, least_seconds
from planner.solve.concatenation import concatenate_prices
from planner.solve.fit import Fit
from planner.solve.played_splits import has_even_stages, played_moves
from planner.solve.recompute import least_recompute, recompute_kinds
from planner.solve.solutions import balanced
from planner.space.grid import Space

AT_ONCE = 2048
"""Number of layouts that are priced together, the simplest first."""

SIMULATED = 4
"""Number of pipelines that are simulated together."""

PLAIN = SCHEDULES.index("1f1b")

SHORT = 1e9
"""Points of a plan that leaves too little memory; more than all other points together."""


def preferred_first(problem: Problem, space: Space, found: Fit, floor: Floor, ranked: Ranked) -> Ranked:
    """The ranking with the preferred plan at its first place; the other plans keep their order.

    Args:
        found: layouts of the space that fit.
        floor: lower bounds of slowness for the layouts of the space.
        ranked: the ranking by the objective, the first plans simulated.
    """
    ranking = ranked.ranking
    if not problem.preference.weighs or problem.objective == "memory" or not len(ranking):
        return ranked
    choice = _Choice(problem, space, found, floor, ranking.prices.take(ranking.places[:1]))
    ranked, place, points = _simplest_of_all(choice, ranked)
    behind = choice.behind_fastest(ranked.ranking.prices.take(np.array([place])))
    if behind > 0.0:
        choice = replace(choice, behind=behind)
        ranked, place, points = _simplest_of_all(choice, ranked)
    moved = choice.moved(ranked.ranking.prices.take(np.array([place])), points)
    if moved is not None:
        ranked, added = ranked.beside(moved)
        place = int(added[0])
    return replace(ranked, ranking=_first(ranked.ranking, place))


def _simplest_of_all(choice: _Choice, ranked: Ranked) -> tuple[Ranked, int, float]:
    """Place and points of the simplest layout among the ranking, its tail, and the solved rows."""
    ranked, place, points = _simplest(choice, ranked)
    solved = choice.solved(points)
    if solved is not None:
        ranked, added = ranked.beside(solved)
        place = int(added[0])
        points = float(choice.points(solved.table, solved.peak_memory_bytes)[0])
    return ranked, place, points


def _simplest(choice: _Choice, ranked: Ranked) -> tuple[Ranked, int, float]:
    """The place and the points of the simplest layout of a ranking and its tail.

    The ranking is returned too, with added layouts and simulated pipelines.
    """
    priced = choice.simplest(ranked.ranking.prices, ranked.ranking.places)
    assert priced is not None  # The fastest is not told apart from itself.
    prices, place, points = priced
    ranked = replace(ranked, ranking=replace(ranked.ranking, prices=prices))
    tail = ranked.ranking.tail
    if tail is not None:
        other = choice.of_rows(tail.rows, points)
        if other is not None:
            row, points = other
            ranked, place = _with_row(ranked, row)
    return ranked, place, points


@dataclass(frozen=True)
class _Choice:
    """Inputs for choosing the preferred plan."""

    problem: Problem
    space: Space
    found: Fit
    floor: Floor
    fastest: Prices
    """The fastest plan alone, its pipeline simulated."""
    behind: float = 0.0
    """The lag behind the fastest up to which layouts count as ties, as a natural logarithm."""

    @cached_property
    def reach(self) -> float:
        """The largest lag of a plan that ties with the fastest, in widths."""
        return apart_at(order_widths().told_apart)

    def points(self, table: LayoutTable, peaks: Floats) -> Floats:
        """Points of each row, [n]; the fewest are best."""
        cluster, preference = self.problem.cluster, self.problem.preference
        short = peaks > cluster.memory_bytes - preference.headroom_bytes(cluster.memory_bytes)
        found = np.where(short, SHORT, 0.0)
        if preference.prefer == "simple":
            found += points_of(preference.points, table, cluster, self.problem.engine)
        return found

    def tied(self, prices: Prices) -> Bools:
        """Rows that tie with the fastest, [n]."""
        score, best = (logarithms(self.problem.objective, each)[0] for each in (prices, self.fastest))
        result: Bools = score - best < self.reach * order_width(self.fastest, prices)
        return result | (score - best <= self.behind)

    def behind_fastest(self, one: Prices) -> float:
        """The lag of a layout behind the fastest, as a natural logarithm."""
        score, best = (logarithms(self.problem.objective, each)[0] for each in (one, self.fastest))
        return float(score[0] - best[0])

    def could_tie(self, table: LayoutTable) -> Floats:
        """The slowness up to which each row counts as a tie, at most, [n].

        Rows that are not told apart within a wider lag than `behind` were looked at before: 0 for these.
        """
        spread = float(self.fastest.spread[0])
        lag = self.reach * widths_of(differences(self.fastest.table, table), spread, order_widths())
        lag = np.where(lag < self.behind, self.behind, -np.inf) if self.behind else lag
        last: Floats = self.pace * np.exp(lag) * (1.0 + 1e-6)
        return last

    @property
    def pace(self) -> float:
        """Slowness of the fastest."""
        fastest = self.fastest
        return float(
            slowness(self.problem.objective, fastest.table.global_batch_size, fastest.step_time_s)[0]
        )

    def simplest(self, prices: Prices, rows: Ints) -> tuple[Prices, int, float] | None:
        """The simplest of some rows of `prices`, with its points; None where none ties.

        Among equally simple ones it is the fastest. The prices are returned too, with simulated pipelines of
        the compared rows: closed forms find candidates, and the simulation must confirm them.
        """
        some = prices.take(rows)
        order = self._in_order(some, np.flatnonzero(self.tied(some)))
        points = self.points(some.table, some.peak_memory_bytes)
        for start in range(0, len(order), SIMULATED):
            block = rows[order[start : start + SIMULATED]]
            new = block[~prices.simulated[block]]
            if len(new):
                prices = prices.simulate(new)
            good = np.flatnonzero(self.tied(prices.take(block)))
            if len(good):
                place = int(good[0])
                return prices, int(block[place]), float(points[order[start + place]])
        return None

    def _in_order(self, prices: Prices, rows: Ints) -> Ints:
        some = prices.take(rows)
        points = self.points(some.table, some.peak_memory_bytes)
        score = logarithms(self.problem.objective, some)[0]
        return rows[np.lexsort((score, points))]

    def of_rows(self, rows: Ints, most: float) -> tuple[int, float] | None:
        """The simplest of some rows of the space that ties, with its points; fewer than `most`."""
        wide = widths_of(_widest(self.space.table), float(self.fastest.spread[0]), order_widths())
        rows = self.floor.rows_below(
            rows, self.pace * math.exp(max(self.reach * float(wide[0]), self.behind))
        )
        points = self.points(self.space.table.take(rows), self.found.peaks[rows])
        rows, points = rows[points < most], points[points < most]
        table = self.space.table.take(rows)
        could = self._could_be(rows, self.could_tie(table))
        rows, points = rows[could], points[could]
        order = np.lexsort((self.floor.of(rows), points))
        where = self.problem.model, self.problem.cluster, self.problem.constants
        for some in _blocks(points[order]):
            block = rows[order[some]]
            prices = price(*where, self.space.table.take(block))
            found = self.simplest(prices, np.arange(len(block)))
            if found is not None:
                return int(block[found[1]]), found[2]
        return None

    def _could_be(self, rows: Ints, last: Floats) -> Bools:
        """Rows of the space that may be as fast as `last` by their lower bounds, [n]."""
        could = self.floor.of(rows) <= last
        if self.problem.cluster.parts or not could.any():
            return could
        some = np.flatnonzero(could)
        table = self.space.table.take(rows[some])
        least = least_seconds(self.problem.model, self.problem.cluster, self.problem.constants, table)
        could[some] = slowness(self.problem.objective, table.global_batch_size, least) <= last[some]
        return could

    def solved(self, most: float) -> Prices | None:
        """A layout that ties, has fewer points than `most`, and fits with recomputation in a part of its
        modules or layers, or with other layers on its stages."""
        problem = self.problem
        if problem.cluster.parts:
            return None
        cluster = problem.cluster
        left = cluster.memory_bytes - problem.preference.headroom_bytes(cluster.memory_bytes)
        smaller = replace(problem, cluster=cluster.model_copy(update={"memory_bytes": left}))
        within = replace(self.found, rows=self.found.peaks <= left)
        parts = [self._recomputing(smaller, within, most), self._balanced(smaller, within, most)]
        some = [replace(part, cluster=cluster) for part in parts if part is not None and len(part)]
        if not some:
            return None
        prices = concatenate_prices(some)
        best = self.simplest(prices, np.arange(len(prices)))
        if best is None or best[2] >= most:
            return None
        return best[0].take(np.array([best[1]]))

    def _recomputing(self, smaller: Problem, within: Fit, most: float) -> Prices | None:
        """Layouts that may tie with fewer points than `most`, and fit with solved recomputation.

        Args:
            smaller: the problem on devices whose memory is less by the headroom.
            within: layouts that fit there.
        """
        problem, table = self.problem, self.space.table
        kinds = recompute_kinds(problem.pins, problem.engine)
        if not kinds:
            return None
        bases = np.flatnonzero(within.states & ~within.rows & (table.recompute == 0))
        points = self.points(table.take(bases), np.zeros(len(bases)))
        bases = bases[points + problem.preference.points.least_recompute < most]
        # Recomputation of a layout adds one difference.
        other = np.full(len(bases), -1)
        last = self.could_tie(replace(table.take(bases), recompute_num_layers=other))
        could = self._could_be(bases, last)
        bases, last = bases[could], last[could]
        if len(bases):
            plain = price(problem.model, problem.cluster, problem.constants, table.take(bases))
            some = slowness(problem.objective, plain.table.global_batch_size, plain.step_time_s) <= last
            bases, last = bases[some], last[some]
        if not len(bases):
            return None
        found = replace(within, states=self._chosen(bases))
        worth = Worth(problem.objective, float(last.max()))
        where = problem.model, smaller.cluster, problem.constants
        return least_recompute(*where, self.space, found, kinds, worth, self.floor)

    def _balanced(self, smaller: Problem, within: Fit, most: float) -> Prices | None:
        """Layouts of 1F1B that may tie with fewer points than `most`, with the layers of their stages solved.

        Args:
            smaller, within: as for `_recomputing`.
        """
        problem, table = self.problem, self.space.table
        if "layers_per_stage" in problem.pins:
            return None
        rows = np.flatnonzero(within.mean & (table.pipeline_parallel > 1))
        rows = rows[table.column("schedule", rows) == PLAIN]
        rows = rows[self.points(table.take(rows), np.zeros(len(rows))) < most]
        # Layers are one difference more, and so is what a layout recomputes besides.
        other = np.full(len(rows), -1)
        last = self.could_tie(replace(table.take(rows), recompute_num_layers=other))
        could = self._could_be(rows, last)
        rows, last = rows[could], last[could]
        if not len(rows):
            return None
        found = replace(within, mean=self._chosen(rows))
        worth = Worth(problem.objective, float(last.max()))
        kinds = recompute_kinds(problem.pins, problem.engine)
        return balanced(smaller, table, found, kinds, worth, self.floor, plain_alone=False)

    def _chosen(self, rows: Ints) -> Bools:
        """The mask of some rows of the space."""
        chosen = np.zeros(len(self.space.table), dtype=np.bool_)
        chosen[rows] = True
        return chosen

    def moved(self, preferred: Prices, most: float) -> Prices | None:
        """The preferred plan after moves of layers that make it faster and keep it as simple.

        Args:
            most: points of the plan.
        """

        def as_simple(prices: Prices) -> Bools:
            simple: Bools = self.points(prices.table, prices.peak_memory_bytes) <= most
            # Enumerated layouts have even stages.
            return simple & ~has_even_stages(prices.table)

        return played_moves(self.problem, preferred, as_simple)


def _widest(table: LayoutTable) -> Floats:
    """The largest differences between two rows of a table, or more, [kinds, 1]."""
    found = []
    for end in (0, 1):
        columns: dict[str, Any] = {name: np.array([table.ends(name)[end]]) for name in ARRAY_FIELDS}
        found.append(replace(table, **columns))
    return differences(*found)


def _blocks(points: Floats) -> Iterator[slice]:
    """Rows grouped by points, in the order of the points."""
    start = 0
    while start < len(points):
        last = points[min(start + AT_ONCE, len(points)) - 1]
        end = int(np.searchsorted(points, last, side="right"))
        yield slice(start, end)
        start = end


def _with_row(ranked: Ranked, row: int) -> tuple[Ranked, int]:
    """The ranking with one row of the tail and its twins moved to the prices.

    Also the place of that row in the prices.
    """
    ranking, rows = ranked.ranking, ranked.rows
    assert ranking.tail is not None
    prices, tail = ranking.prices, ranking.tail
    own = tail.rows == row
    alike = _differ_in_form(tail.table.take(np.array([row])), tail.table.take(tail.rows)) & ~own
    moved = np.concatenate([tail.rows[own], tail.rows[alike]])
    added = price(prices.model, prices.cluster, prices.engine, tail.table.take(moved))
    if not added.simulated.all():
        added = added.simulate(np.flatnonzero(~added.simulated))
    twins = _equal_figures(added, added.take(slice(0, 1)))
    moved, added = moved[twins], added.take(twins)
    kept = tail.rows[~np.isin(tail.rows, moved)]
    place = len(prices)
    rows = np.concatenate([rows[:place], moved, kept])
    ranking = replace(
        ranking,
        prices=concatenate_prices([prices, added]),
        places=np.concatenate([ranking.places, place + np.arange(len(moved))]),
        tail=Tail(tail.table, kept) if len(kept) else None,
    )
    return replace(ranked, ranking=ranking, rows=rows), place


def _equal_figures(prices: Prices, one: Prices) -> Bools:
    """Rows with the same time and bytes as `one`, [n]."""
    result: Bools = np.isclose(prices.step_time_s, one.step_time_s[0], rtol=SAME, atol=0.0)
    result &= np.isclose(prices.peak_memory_bytes, one.peak_memory_bytes[0], rtol=SAME, atol=0.0)
    return result


def _differ_in_form(one: LayoutTable, others: LayoutTable) -> Bools:
    """Rows that differ from `one` only in the forms of twins, [n]."""
    same = equal_but_for(tuple(FORMS), one, others)
    if same.any():
        split = one.splits[int(one.split[0])]
        same &= np.array([each == split for each in others.splits])[others.split]
    return same


def _first(ranking: Ranking, place: int) -> Ranking:
    """The ranking with a row of its prices at the first place, and its twins next to it."""
    prices = ranking.prices
    own = prices.take(np.array([place]))
    alike = _differ_in_form(own.table, prices.table) & _equal_figures(prices, own)
    alike[place] = False
    of_place = alike[ranking.places]
    rest = ranking.places[~of_place & (ranking.places != place)]
    return replace(ranking, places=np.concatenate([[place], ranking.places[of_place], rest]))
