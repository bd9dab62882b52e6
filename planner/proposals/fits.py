"""A test if a changed question may have a plan that fits, and the first plan of a changed question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.inputs.choice import Choice
from planner.inputs.pins import Pins
from planner.plan import Plan
from planner.problem import Problem
from planner.proposals.proposal import Changed, Proposal
from planner.ranking.answer import answer
from planner.ranking.ranking import fit_of, rank
from planner.solve.offload import offload_space
from planner.space.grid import Space

LEAST: Pins = {
    "micro_batch_size": 1,
    "recompute": "full",
    "virtual_pipeline_parallel": 1,
    "schedule": "1f1b",
}
"""Degrees of the layouts that usually need the least memory."""

LITTLE: Pins = {"recompute": "full", "schedule": Choice(("1f1b", "interleaved"))}
"""Degrees of other layouts that may need less memory.

Short chunks accumulate gradients of few layers at a time; a step of one microbatch accumulates none."""

MOST_LEAST = 3000
"""Most layouts with the degrees of `LEAST` with which those of `LITTLE`, forty times as many, are examined
too."""


@dataclass()
class Budget:
    """The number of legal layouts that may still be examined."""

    rows: int


def may_fit(problem: Problem, offload: bool = True) -> bool:
    """Return whether a layout that needs little memory fits, with offloading too if `offload`."""
    for pins in (LEAST, LITTLE):
        asked = replace(problem, pins={**pins, **problem.pins})
        space = _space(asked)
        if space is None and pins is LITTLE:
            asked, space = problem, _space(problem)
        if space is None:
            continue
        if _has_fitting(asked, space, offload):
            return True
        if len(space.table) > MOST_LEAST:
            return False
    return False


def _has_fitting(problem: Problem, space: Space, offload: bool) -> bool:
    """Return whether a layout of the space fits, or a layout solved from one."""
    if fit_of(problem, space).rows.any():
        return True
    # Under a maximum a step may have fewer microbatches, and other recomputation than all layers is solved.
    if problem.batch.maximum or problem.pins.get("recompute") != "full":
        return rank(problem, space, 0.0, offload).feasible > 0
    resort = offload_space(problem, space) if offload else None
    return resort is not None and bool(fit_of(problem, resort[1]).rows.any())


def _space(problem: Problem) -> Space | None:
    """The legal layouts, None where there are none."""
    try:
        space = problem.space()
    except InputError:
        return None
    return space if len(space.table) else None


def first_that_fits(some: Iterable[Changed], budget: Budget, offload: bool = True) -> list[Proposal]:
    """The first of some changed questions that has a plan, with that plan; None where none has one."""
    for changed in some:
        if may_fit(changed.problem, offload):
            found = _searched(changed, budget)
            if found is not None and (offload or not offloads(found.plan)):
                return [found]
    return []


def _searched(changed: Changed, budget: Budget) -> Proposal | None:
    """The changed question with its first plan, or with the first plan of the layouts that need the least
    memory."""
    problem, is_first = changed.problem, True
    space = _space(problem)
    if space is None:
        return None
    if len(space.table) > budget.rows:
        problem, is_first, space = replace(problem, pins={**LEAST, **problem.pins}), False, None
    budget.rows -= 0 if space is None else len(space.table)
    result = answer(problem, space)
    if result is None or result.best is None:
        return None
    return Proposal(changed.kind, changed.what, changed.flags, changed.keywords, result.best, is_first)


def offloads(plan: Plan) -> bool:
    """Return whether a plan offloads anything to host memory."""
    return plan.layout.offload_activations or plan.layout.offload_optimizer
