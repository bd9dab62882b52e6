"""Ranking: price the legal layouts of a problem and put them in order."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from costmodels.engine import Engine
from costmodels.estimate import Estimate
from costmodels.hardware import Cluster, Precision
from costmodels.layout import Layout
from costmodels.model_spec import ModelSpec
from costmodels.pricing import Prices, estimate, peak_memory, price
from costmodels.simulation import FIRST_TRY
from costmodels.table import Floats, Ints, LayoutTable, combined
from planner import objective as objectives
from planner import reasons
from planner.bounds import Fit, fit
from planner.heterogeneous_solve import fit_of_kinds
from planner.joining import joined, joined_prices
from planner.last_resort import REASON, last_resorts
from planner.objective import Objective, logarithms
from planner.pins import Pins
from planner.plan import Plan
from planner.rules import DEVICE_MEMORY
from planner.solve import solved
from planner.space import Batch, Space, build
from planner.verified_memory import verify, with_exact_memory

FEWEST, MOST = 10, 20
"""Plans at the top of the ranking whose pipelines are simulated, however long they take, and at most."""

VERIFIED = MOST
"""Plans at the top of the ranking whose memory must be exact before their pipelines are simulated."""

MOST_PASSES = 20_000
"""Passes of the pipelines after the first `FEWEST` that are simulated."""


@dataclass(frozen=True)
class Problem:
    """What is asked: all inputs, resolved."""

    model: ModelSpec
    cluster: Cluster
    engine: Engine
    batch: Batch
    precision: Precision
    pins: Pins
    objective: Objective = "throughput"

    def space(self) -> Space:
        """The legal layouts; raises `InputError` when the pins do not divide the world size."""
        return build(self.model, self.cluster.world_size, self.batch, self.precision, self.pins)


@dataclass(frozen=True)
class SearchResult:
    """All legal layouts of a problem, priced; plans are made from its rows on demand."""

    problem: Problem
    considered: int
    """Layouts of the whole product: `legal` plus those that a rule removed."""
    legal: int
    feasible: int
    """Legal layouts that fit into memory."""
    rejected: dict[str, int]
    """Layouts by the rule that removed them, `device_memory` included."""
    elapsed_s: float
    """Seconds of the search itself, without imports and input."""
    tables: tuple[LayoutTable, ...]
    """The legal layouts: the enumerated ones, then those with solved degrees."""
    fitting: Ints
    """Rows of `table` that fit, best first.

    The first ones are ordered by their simulated pipelines, those behind them by closed forms.
    """
    prices: Prices
    """Of the layouts that fit; those at the top of the ranking with simulated pipelines."""
    places: Ints
    """Rows of `prices`, best first."""
    solved: int = 0
    """Layouts with solved degrees, which the counts and the table have besides the enumerated ones."""
    offloads: bool = False
    """Nothing fits without offloading."""
    notes: tuple[str, ...] = ()
    """Where nodes are of two kinds: which ranks each has, and what one kind alone would do."""

    @cached_property
    def table(self) -> LayoutTable:
        """The legal layouts."""
        return joined(self.tables)

    @cached_property
    def order(self) -> Ints:
        """Rows of `table`, best first: those that fit by the objective, then the others by memory."""
        problem = self.problem
        other = np.setdiff1d(np.arange(self.legal), self.fitting)
        # Seldom asked for: what does not fit is not shown beside what does.
        memory = peak_memory(problem.model, problem.cluster, problem.engine, self.table.take(other))
        return np.concatenate([self.fitting, other[_order(self.table, other, np.log(memory))]])

    @property
    def best(self) -> Plan | None:
        """The first plan that fits; None when none does."""
        return self.plan(0) if self.feasible else None

    def plans(self, top: int = 10) -> list[Plan]:
        """The best `top` plans that fit, best first as `order` has them."""
        return [self.plan(rank) for rank in range(min(top, self.feasible))]

    def closest(self, top: int = 1) -> list[Plan]:
        """The `top` plans that do not fit and lack least memory, nearest first."""
        return [self.plan(rank) for rank in range(self.feasible, min(self.feasible + top, self.legal))]

    def plan(self, rank: int) -> Plan:
        """The plan at a place of the ranking, 0 being the first."""
        layout, estimate = self._candidate(rank)
        return Plan(
            model=self.problem.model,
            cluster=self.problem.cluster,
            engine=self.problem.engine,
            layout=layout,
            estimate=estimate,
            fits=rank < self.feasible,
            reason=self._reason(rank),
            objective=self.problem.objective,
            considered=self.considered,
            legal=self.legal,
            feasible=self.feasible,
            rejected=self.rejected,
        )

    @cached_property
    def _candidates(self) -> dict[int, tuple[Layout, Estimate]]:
        """Those that were asked for: a plan is compared with others, which cost some time each."""
        return {}

    def _candidate(self, rank: int) -> tuple[Layout, Estimate]:
        if rank not in self._candidates:
            if rank < self.feasible:
                place = int(self.places[rank])
                layout, cost = self.prices.table.layout(place), self.prices.estimate(place)
            else:
                problem, layout = self.problem, self.table.layout(int(self.order[rank]))
                cost = estimate(problem.model, problem.cluster, problem.engine, layout)
            where = self.problem.model, self.problem.cluster, self.problem.engine
            self._candidates[rank] = layout, with_exact_memory(*where, layout, cost)
        return self._candidates[rank]

    def _reason(self, rank: int) -> str:
        if rank >= self.feasible:
            return reasons.too_big(self._candidate(rank)[1], self.problem.cluster)
        if self.feasible == 1:
            return self._resort + "the only legal layout that fits into memory"
        if rank == 0:
            found = objectives.ahead(self.problem.objective, self._candidate(0), self._candidate(1))
        else:
            found = objectives.behind(self.problem.objective, self._candidate(rank), self._candidate(0))
        return self._resort + found

    @property
    def _resort(self) -> str:
        return REASON if self.offloads else ""


def rank(problem: Problem, space: Space, started: float, offload: bool = False) -> SearchResult:
    """Price and order the legal layouts of a problem, of which there must be one at least.

    `started` is the reading of `time.perf_counter` from which `elapsed_s` counts. With `offload`, layouts
    that offload activations or the optimizer are searched too where nothing fits without.
    """
    model, cluster, engine = problem.model, problem.cluster, problem.engine
    found, alone = _fit(problem, space), space
    if offload and not found.rows.any():
        for space in last_resorts(problem, alone):
            found = _fit(problem, space)
            if found.rows.any():
                break
    rows = np.flatnonzero(found.rows)
    # Most layouts of a large model do not fit; only the others are timed.
    prices = price(model, cluster, engine, space.table.take(rows))
    further = solved(problem, space, found, prices)
    prices = joined_prices([prices, *further])
    solutions = len(prices) - len(rows)
    rows = np.concatenate([rows, len(space.table) + np.arange(solutions)])
    places = _order(prices.table, np.arange(len(rows)), *logarithms(problem.objective, prices))
    prices, places = _verified(problem, prices, places)
    if offload and len(rows) and not len(places):
        # What seemed to fit does not: the last resorts after all.
        for resort in last_resorts(problem, alone):
            result = rank(problem, resort, started)
            if result.feasible:
                return replace(result, offloads=True)
    first = places[: _simulated(prices.table.take(places[:MOST]))]
    prices = prices.simulate(first)
    again = _order(prices.table, first, *logarithms(problem.objective, prices.take(first)))
    places[: len(first)] = first[again]
    legal, feasible = len(space.table) + solutions, len(places)
    rejected = dict(space.illegal)
    if legal > feasible:
        rejected[DEVICE_MEMORY] = legal - feasible
    return SearchResult(
        problem=problem,
        considered=space.considered + solutions,
        legal=legal,
        feasible=feasible,
        rejected=rejected,
        elapsed_s=time.perf_counter() - started,
        tables=(space.table, *(some.table for some in further)),
        fitting=rows[places],
        prices=prices,
        places=places,
        solved=solutions,
        offloads=feasible > 0 and space is not alone,
    )


def _verified(problem: Problem, prices: Prices, places: Ints) -> tuple[Prices, Ints]:
    """Prices with the exact memory of the first places, where it is known, and the places without those rows
    that do not fit by it."""
    checked, more = 0, VERIFIED
    while checked < min(VERIFIED, len(places)):
        some, rest = places[checked : checked + more], places[checked + more :]
        prices, fits = verify(prices, some)
        places = np.concatenate([places[:checked], some[fits], rest])
        # Where many do not fit, more of the others may not either.
        checked, more = checked + int(fits.sum()), 2 * more
    if problem.objective == "memory":
        first = places[:checked]
        again = _order(prices.table, first, *logarithms(problem.objective, prices.take(first)))
        places = np.concatenate([first[again], places[checked:]])
    return prices, places


def _fit(problem: Problem, space: Space) -> Fit:
    where = problem.model, problem.cluster, problem.engine
    if problem.cluster.parts:
        return fit_of_kinds(*where, space.table)
    return fit(*where, space.table, space.states)


def _simulated(table: LayoutTable) -> int:
    """How many rows at the top of the ranking are simulated."""
    pipeline = table.pipeline_parallel
    # Long schedules are played until they are steady, which most are by then.
    played = np.minimum(table.micro_batches, 2 * FIRST_TRY * pipeline)
    passes = np.where(pipeline > 1, 2 * played * pipeline * table.virtual_pipeline_parallel, 0).cumsum()
    return max(min(len(table), FEWEST), int(np.searchsorted(passes, MOST_PASSES)))


def _order(table: LayoutTable, rows: Ints, *logarithms: Floats) -> Ints:
    """Places in `rows` by the logarithms of what is to be least, the first first; ties to the simplest."""
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
    scores = [np.round(logarithm, 9) for logarithm in logarithms]
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
    return np.lexsort((combined([column[rows] for column in ties]), *reversed(scores)))
