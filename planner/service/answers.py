"""A question as groups of flags, and its answer as records, which `planner suggest` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from costmodels.dataclass import dataclass
from costmodels.errors import NoLayoutFits
from costmodels.network.topology import describe
from costmodels.spec.record import GIB
from planner import advice
from planner.api import search_problem
from planner.budget.goal import Goal
from planner.budget.run import Run
from planner.inputs.choice import Choice
from planner.inputs.device import measured_notes
from planner.inputs.pins import WherePossible
from planner.megatron_plan import OtherPlan, with_other_plan
from planner.options.batch import BatchOptions
from planner.options.budget import BudgetOptions
from planner.options.cluster import HardwareOptions, WorldSizesOptions
from planner.options.flags import one_line
from planner.options.given_layout import GivenLayout
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from planner.options.search import (
    announced_devices,
    assumed_engine,
    assumed_loads,
    idle_links,
    search_keywords,
)
from planner.plan import Plan
from planner.problem import Problem, SearchKeywords, resolve_problem
from planner.ranking.distinct import DistinctPlan, distinct_plans
from planner.ranking.result import SearchResult
from planner.ranking.ties import chances, indistinguishable
from planner.service.plan_notes import (
    expert_island_notes,
    head_room,
    headroom_notes,
    headroom_notes_of_sizes,
    needs_head_room,
    optimizer_notes,
    training_notes,
)
from planner.space.rule import Rule

if TYPE_CHECKING:
    from planner.proposals.proposal import Proposal
    from planner.world_sizes import Sizes

PLANS = 10
"""Default number of plans in lists."""

SHARED_FIELDS = {
    *("version", "model", "cluster", "engine", "objective", "preference", "considered", "legal", "feasible"),
    *("rejected", "asked"),
}
"""Fields that an answer has once instead of in each plan, or not at all."""

SHARED_BY_SIZES = SHARED_FIELDS - {"cluster", "considered", "legal", "feasible"}
"""Fields that an answer for several world sizes has once instead of in each plan, or not at all."""

Waiting = Callable[[str], AbstractContextManager[None]]
"""A function that makes a context around long work from a description of that work."""


@dataclass(frozen=True)
class Question:
    """A question to the planner, by the groups of flags."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cluster: WorldSizesOptions = field(default_factory=WorldSizesOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    given: GivenLayout = field(default_factory=GivenLayout)

    @cached_property
    def world_size(self) -> int | str:
        """Devices of the job, or a text with several numbers of devices; raises `InputError` where none is
        given."""
        counted = self.cluster.device_count() if self.cluster.world_size is None else None
        return self.cluster.required_world_size() if counted is None else counted

    @cached_property
    def pinned(self) -> ParallelOptions:
        """The flags of degrees, with those of a given layout."""
        return self.given.pinned(self.parallel)

    def keywords(self, rules: Sequence[Rule]) -> SearchKeywords:
        """Keywords of `planner.search`, besides the model and the world size."""
        batch = self.given.of_its_batch(self.batch, self.world_size)
        return search_keywords(self.model.spec(), self.cluster, batch, self.pinned, rules)

    def assumed(self) -> list[str]:
        """Assumptions about values that no flag gives."""
        parts = self.model, self.cluster, self.budget, self.pinned
        return [note for part in parts for note in part.notes()]


@dataclass(frozen=True)
class Answer:
    """The answer to a question about one world size."""

    question: Question
    result: SearchResult
    rows: list[DistinctPlan]
    """The first plans, without twins; where nothing fits, those that lack the least memory."""
    other: OtherPlan | None
    """The plan for Megatron-LM, if it was searched."""
    assumed: list[str]
    notes: list[str]
    error: NoLayoutFits | None
    """The error of an answer without a plan, with changes that would fit."""
    error_line: str | None
    """The reason why there is no plan, with flags spelled as on the command line."""

    @property
    def plans(self) -> list[Plan]:
        """The plans of the rows."""
        return [row.plan for row in self.rows]

    @property
    def goal(self) -> Goal:
        """The deadline and the budget."""
        return self.question.budget.goal()

    @property
    def best(self) -> Plan | None:
        """The first plan, with the question about the run noted in it; None where none fits."""
        if not self.result.feasible:
            return None
        return self.plans[0].model_copy(update={"asked": self.question.budget.question()})

    def runs(self, most: int | None = None) -> list[Run]:
        """The runs of the plans, or of the first `most`; empty where no run was asked for, or nothing
        fits."""
        asked, failures = self.question.budget.question(), self.question.budget.failures()
        if asked is None or not self.result.feasible:
            return []
        return [plan.run(asked.run_tokens, asked.price, failures) for plan in self.plans[:most]]

    @property
    def proposals(self) -> Sequence[Proposal]:
        """Changes that would fit, where nothing does."""
        return () if self.error is None else self.error.proposals

    def as_json(self) -> dict[str, Any]:
        """The answer of `planner suggest --json`."""
        result, goal, runs = self.result, self.goal, self.runs()
        problem, of_places = result.problem, chances(result)
        return {
            "model": problem.model.model_dump(mode="json") | {"parameters": problem.model.parameters},
            "cluster": problem.cluster.model_dump(mode="json"),
            "engine": problem.engine.name,
            "precision": problem.precision,
            "batch": {"size": problem.batch.size, "maximum": problem.batch.maximum},
            "objective": problem.objective,
            "prefer": problem.preference.prefer,
            "headroom_gib": problem.preference.headroom_bytes(problem.cluster.memory_bytes) / GIB,
            "pins": {
                name: str(value) if isinstance(value, (WherePossible, Choice)) else value
                for name, value in problem.pins.items()
            },
            "assumed": self.assumed,
            "notes": self.notes,
            "considered": result.considered,
            "legal": result.legal,
            "feasible": result.feasible,
            "rejected": result.rejected,
            "elapsed_s": result.elapsed_s,
            "indistinguishable": indistinguishable(result),
            "fastest_place": result.first_faster + 1 if result.feasible else None,
            "plans": [
                {"place": row.place, "twins": row.twins, "chance_faster": _at(of_places, row.place)}
                | row.plan.model_dump(mode="json", exclude=SHARED_FIELDS)
                | ({"run": asdict(runs[number])} if runs else {})
                | ({"keeps_goal": goal.is_kept(runs[number])} if runs and goal.is_given else {})
                for number, row in enumerate(self.rows)
            ],
            "megatron": None if self.other is None else self.other.as_json(),
            "proposals": [one.as_json() for one in self.proposals],
            "error": self.error_line,
        }


def _at(of_places: Sequence[float], place: int) -> float | None:
    """The chance of the plan at a place, from 1, to be faster than the first; None where it is not known."""
    return of_places[place - 1] if 1 < place <= len(of_places) else None


@dataclass(frozen=True)
class SizesAnswer:
    """The answer to a question about several world sizes."""

    question: Question
    found: Sizes
    assumed: list[str]
    notes: list[str]
    error: NoLayoutFits | None
    """The error of an answer where no size has a plan, with changes that would fit."""
    error_line: str | None
    """The reason why no size has a plan, with flags spelled as on the command line."""

    @property
    def best(self) -> Plan | None:
        """The plan of the recommended size; None where nothing fits."""
        return self.found.plan

    @property
    def proposals(self) -> Sequence[Proposal]:
        """Changes that would fit, where nothing does."""
        return () if self.error is None else self.error.proposals

    def as_json(self) -> dict[str, Any]:
        """The answer of `planner suggest --json` of several world sizes."""
        found, chosen = self.found, self.found.chosen
        problem = found.problem
        return {
            "model": problem.model.model_dump(mode="json") | {"parameters": problem.model.parameters},
            "engine": problem.engine.name,
            "precision": problem.precision,
            "batch": {"size": problem.batch.size, "maximum": problem.batch.maximum},
            "objective": found.objective,
            "assumed": self.assumed,
            "notes": self.notes,
            "proposals": [one.as_json() for one in self.proposals],
            "error": self.error_line,
            "tokens": found.tokens,
            "price_per_hour": None if found.price is None else found.price.amount,
            "currency": None if found.price is None else found.price.currency,
            "deadline_days": found.goal.deadline_days,
            "budget": None if found.goal.budget is None else found.goal.budget.amount,
            "chosen": None if chosen is None else chosen.world_size,
            "recommendation": None if found.recommendation is None else asdict(found.recommendation),
            "front": [size.world_size for size in found.front],
            "sizes": [
                {
                    "world_size": size.world_size,
                    "on_front": size.on_front,
                    "problem": size.problem,
                    "plan": (
                        None
                        if size.plan is None
                        else size.plan.model_dump(mode="json", exclude=SHARED_BY_SIZES)
                    ),
                    "run": None if size.run is None else asdict(size.run),
                }
                for size in found.sizes
            ],
        }


def ask(
    question: Question,
    rules: Sequence[Rule] = (),
    top: int = PLANS,
    waiting: Waiting = lambda what: nullcontext(),
) -> Answer | SizesAnswer:
    """The answer to a question; raises `InputError` for a wrong one, and where no layout is legal.

    Args:
        rules: rules for layouts that this job cannot run.
        top: number of plans that are listed.
        waiting: context around long work.
    """
    question.budget.failures()  # Errors of the run are told before anything is searched.
    if isinstance(question.world_size, str):
        return _ask_sizes(question, rules, waiting)
    spec, job, assumed = question.model.spec(), question.keywords(rules), question.assumed()
    question.budget.question()
    with waiting("planning"):
        asked = resolve_problem(spec, question.world_size, **job)
        result, other = (
            with_other_plan(asked) if question.parallel.engine is None else (search_problem(asked), None)
        )
        rows = distinct_plans(result, top)
    rows = rows or [DistinctPlan(place, plan) for place, plan in enumerate(result.closest(top), 1)]
    with waiting("looking for changes that would fit"):
        error = None if result.feasible else advice.no_layout_fits(result)
    problem = result.problem
    assumed += [*idle_links(question.cluster, problem.cluster), *measured_notes(problem.cluster.device)]
    assumed += [*assumed_engine(question.parallel, problem), *announced_devices(problem.cluster)]
    assumed += assumed_loads(rows[0].plan if result.feasible else None)
    notes = [
        *result.notes,
        *_of_problem(problem, question.cluster),
        *_of_plans([row.plan for row in rows], question.pinned),
    ]
    return Answer(question, result, rows, other, assumed, notes, error, _line(error))


def _line(error: NoLayoutFits | None) -> str | None:
    return None if error is None else one_line(error)


def _ask_sizes(question: Question, rules: Sequence[Rule], waiting: Waiting) -> SizesAnswer:
    from planner.world_sizes import no_size_fits, sizes  # Few questions are about several sizes.

    budget, assumed = question.budget, question.assumed()
    with waiting("planning for each world size"):
        found = sizes(
            question.model.spec(),
            world_size=question.world_size,
            tokens=budget.tokens,
            price_per_hour=budget.price_per_hour,
            deadline_days=budget.deadline_days,
            budget=budget.budget,
            failures=budget.failures(),
            **question.keywords(rules),
        )
    problem = found.problem
    assumed += [*assumed_engine(question.parallel, problem), *announced_devices(problem.cluster)]
    assumed += assumed_loads(found.plan)
    assumed += measured_notes(problem.cluster.device)
    plans = {size.world_size: size.plan for size in found.sizes if size.plan is not None}
    notes = [
        *_of_problem(problem, question.cluster),
        *_of_sizes(plans, found.plan, question.pinned),
    ]
    error = no_size_fits(found) if found.plan is None else None
    return SizesAnswer(question, found, assumed, notes, error, _line(error))


def _of_problem(problem: Problem, cluster: HardwareOptions) -> Iterator[str]:
    """Notes on a problem that hold for any plan."""
    if problem.objective == "step-time" and problem.batch.maximum:
        yield (
            f"steps of the largest batch up to {problem.batch.size} that each layout can run are compared; "
            "--global-batch-size compares equal ones"
        )
    yield from _joined(problem, cluster)
    yield from training_notes(problem)


def _joined(problem: Problem, cluster: HardwareOptions) -> Iterator[str]:
    """A note on the network, if flags describe it."""
    if cluster.network():
        yield f"network: {describe(problem.cluster)}"


def _of_plans(plans: list[Plan], parallel: ParallelOptions) -> Iterator[str]:
    """Notes on assumptions behind the figures of plans, and on effects that would lower them."""
    uneven = [plan for plan in plans if needs_head_room(plan)]
    if uneven:
        yield head_room(uneven[0])
    for plan in plans[:1]:
        yield from headroom_notes(plan)
        yield from expert_island_notes(plan)
        yield from optimizer_notes(plan, parallel)


def _of_sizes(plans: dict[int, Plan], best: Plan | None, parallel: ParallelOptions) -> Iterator[str]:
    """Notes on several world sizes: on the recommended plan, and on sizes whose plans leave too little
    memory."""
    uneven = [plan for plan in plans.values() if needs_head_room(plan)]
    if uneven:
        # Of the recommended plan where it has such experts, as the share differs.
        yield head_room(best if best is not None and needs_head_room(best) else uneven[0])
    yield from headroom_notes_of_sizes(plans)
    if best is not None:
        yield from expert_island_notes(best)
        yield from optimizer_notes(best, parallel)
