"""The contents of a report on a plan or a run: the plan, its rivals, its pipeline, and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from costmodels.timeline import Timeline
from planner.api import search_problem
from planner.budget.question import RunQuestion
from planner.budget.run import Run
from planner.explanation.comparison import Comparison, compare
from planner.explanation.explanation import problem_of
from planner.history.step_parts import StepParts
from planner.inputs.batch import Batch
from planner.plan import Plan
from planner.problem import Problem
from planner.processes import Calls, helpers_for
from planner.proposals.devices import with_world_size
from planner.ranking.distinct import DistinctPlan, distinct_plans
from planner.ranking.result import SearchResult
from planner.report.measured import profiled_parts
from planner.world_sizes import Size, marked_front, own_run, planned_size, size_run

RIVALS = 10
"""Number of plans of the ranking that are shown."""

MOST_DEVICES_A_SEQUENCE = 64
"""Devices for each sequence of a step above which larger numbers of devices are not compared."""

MOST_POINTS = 3000
"""Most layouts in the chart of time against memory; of more layouts, every n-th is drawn."""

MOST_PASSES = 20_000
"""Most passes that a browser draws without delay; of a longer pipeline only the first and the last
microbatches are drawn."""


@dataclass(frozen=True)
class Cloud:
    """Layouts that fit: tokens per second of a device, bytes of the fullest device, and the Pareto-optimal
    layouts."""

    tokens_per_s: np.ndarray
    peak_bytes: np.ndarray
    on_front: np.ndarray
    names: tuple[str, ...]
    """Names of the layouts on the Pareto front, in their order."""


@dataclass(frozen=True)
class Contents:
    """All contents of a page."""

    plan: Plan
    rows: tuple[DistinctPlan, ...]
    """The first plans of the same question, without twins, best first."""
    comparison: Comparison | None
    """The comparison of the plan with the best other plan."""
    cloud: Cloud
    timeline: Timeline | None
    """The simulated timeline; None where the schedule cannot be simulated, or has too many passes."""
    no_timeline: str
    """The reason why there is no timeline."""
    asked: RunQuestion
    """The question about the whole run, with the compared sizes; for a single size, half and twice as many
    devices are added."""
    run: Run | None
    """The run of the plan, where one was asked for."""
    records: tuple[dict[str, Any], ...]
    """The records that a run of the plan has logged; empty before a run."""
    parts: StepParts | None
    """Profiled parts of the step on the run's first rank, scaled to the median step; None without a
    profile."""

    @property
    def rivals(self) -> tuple[Plan, ...]:
        """The plans of the rows."""
        return tuple(row.plan for row in self.rows)


def gather(plan: Plan, records: Sequence[dict[str, Any]] = ()) -> Contents:
    """The contents of a page on a plan: the search for the plan's batch is run again, and the plan's pipeline
    is simulated."""
    # Twins, which every estimate has equal, stand for each other: a runner-up has something else.
    result = search_problem(problem_of(plan))
    rows = distinct_plans(result, RIVALS)
    others = [row.plan for row in rows if row.plan.layout != plan.layout]
    timeline, missing = _timeline(plan)
    return Contents(
        plan=plan,
        rows=tuple(rows),
        comparison=compare(plan, others[0]) if others else None,
        cloud=_cloud(result),
        timeline=timeline,
        no_timeline=missing,
        asked=_asked(plan, result),
        run=None if plan.asked is None else own_run(plan, plan.asked),
        records=tuple(records),
        parts=profiled_parts(records),
    )


def _timeline(plan: Plan) -> tuple[Timeline | None, str]:
    try:
        return plan.timeline(), ""
    except InputError as error:
        return None, str(error)


def _cloud(result: SearchResult) -> Cloud:
    """At most `MOST_POINTS` layouts that fit, and all of the Pareto front."""
    prices = result.prices
    if not len(prices.table):
        return Cloud(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.bool_), ())
    speed = prices.tokens_per_s / result.problem.cluster.world_size
    peak = prices.peak_memory_bytes
    order = np.lexsort((-speed, peak))
    best = np.maximum.accumulate(speed[order])
    leads = np.concatenate(([True], speed[order][1:] > best[:-1]))
    front = order[leads]
    some = np.union1d(front, order[:: -(-len(order) // MOST_POINTS)])
    shown = some[np.argsort(peak[some], kind="stable")]
    on_front = np.isin(shown, front)
    names = tuple(prices.table.layout(int(row)).describe() for row in shown[on_front])
    return Cloud(speed[shown], peak[shown] / GIB, on_front, names)


def _asked(plan: Plan, result: SearchResult) -> RunQuestion:
    """The question about the run; for a single size, with half and twice as many devices added."""
    asked = plan.asked or RunQuestion(tokens=None)
    if asked.sizes or plan.cluster.parts:
        return asked
    own = Size(plan.cluster.world_size, plan, own_run(plan, asked), None, None)
    calls = [partial(planned_size, problem, asked) for problem in _other_sizes(result.problem)]
    with Calls(calls, helpers_for(len(calls), result.elapsed_s)) as made:
        found = marked_front([own, *made.results()])
    return asked.model_copy(update={"sizes": tuple(map(size_run, found))})


def _other_sizes(problem: Problem) -> Iterator[Problem]:
    """This question for half and for twice as many devices, with at most the same global batch."""
    most = replace(problem, batch=Batch(problem.batch.size, maximum=True))
    world = problem.cluster.world_size
    for size in (world // 2, 2 * world):
        if 1 <= size <= MOST_DEVICES_A_SEQUENCE * problem.batch.size:
            other = with_world_size(most, size)
            if size % other.cluster.devices_per_node == 0:
                yield other
