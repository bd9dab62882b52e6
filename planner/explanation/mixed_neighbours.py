"""The layouts one step from the best on nodes of two kinds, each with its best layers of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from costmodels.spec.layout import SHORT_NAMES
from costmodels.spec.record import GIB
from planner.explanation.neighbours import MESH, Neighbour
from planner.inputs.pins import Pins
from planner.objective import gain, metric
from planner.plan import Plan
from planner.problem import Problem
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult


def neighbour_searches(result: SearchResult, near: Sequence[Neighbour]) -> list[Neighbour]:
    """The neighbours `near`, the best first; each legal one is found by a search of its own.

    A search sizes only the stages of layouts that could be among its first; other layouts keep even stages.
    """
    best = result.best
    if best is None:
        return list(near)
    found = [_anew(result.problem, best, one) for one in near]
    fit = [one for one in found if one.figure is not None and one.ratio is not None]
    others = [one for one in found if one.figure is None or one.ratio is None]
    objective = best.objective
    return [*sorted(fit, key=lambda one: -gain(objective, one.figure or 1.0, 1.0)), *others]


def _anew(problem: Problem, best: Plan, one: Neighbour) -> Neighbour:
    if one.layout is None:
        return one
    changed = [SHORT_NAMES.get(step.split()[0], step.split()[0]) for step in one.change.split(", ")]
    pins: Pins = {name: getattr(one.layout, name) for name in (*MESH, *changed)}
    again = replace(problem, pins={**problem.pins, **pins})
    found = rank(again, again.space(), 0.0)
    if not found.feasible:
        lacks = found.closest()[0].estimate.peak_memory_bytes - problem.cluster.memory_bytes
        return replace(one, ratio=None, figure=None, lacks_gib=lacks / GIB)
    plan = found.plan(0)
    ratio = plan.estimate.tokens_per_s / best.estimate.tokens_per_s
    value = metric(best.objective, plan.estimate)
    return replace(one, layout=plan.layout, ratio=ratio, figure=value, lacks_gib=None)
