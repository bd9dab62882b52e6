"""The layouts one step from the best: the cost of each change of a degree, or the rule that forbids it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from pydantic import ValidationError

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.pricing import Prices, peak_memory, price
from costmodels.spec.layout import SHORT_NAMES, Layout, even_split
from costmodels.spec.record import GIB
from costmodels.spec.table import Bools, LayoutTable, code_of, distinct_numbers, value_of
from planner.inputs.pin_notation import value_text
from planner.objective import metric
from planner.plan import Plan
from planner.problem import Problem
from planner.ranking.result import SearchResult
from planner.space.rule import divisors
from planner.space.rules import RULES

MESH = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
EXPERTS = ("expert_parallel", "expert_tensor_parallel")

SHORT = {name: short for short, name in SHORT_NAMES.items()}


@dataclass(frozen=True)
class Neighbour:
    """The best layout with one degree changed (or two of the mesh, with the same product), the rest
    re-optimised."""

    change: str
    """The change in words, such as `tp 8 -> 16, dp 4 -> 2`."""
    layout: Layout | None
    """The best changed layout that fits, or else the smallest; None where none is legal."""
    ratio: float | None
    """Tokens per second over those of the best plan; None where the changed plan does not fit."""
    figure: float | None
    """The figure that plans are ranked by, in the unit of `objective.METRICS`. With `were_it_legal` it is the
    figure that the illegal change would have."""
    lacks_gib: float | None
    """GiB that the changed plan lacks; None where the plan fits or is illegal."""
    rule: str | None
    """The rule that forbids all changed layouts; None where one is legal."""
    were_it_legal: float | None
    """The ratio that a forbidden change would give if the shapes could be divided that way; None if it would
    not fit."""


def neighbours(result: SearchResult) -> list[Neighbour]:
    """The layouts one step from the best plan, the best first, then those that are too big, then the illegal
    ones."""
    if result.best is None:
        return []
    best, problem = result.best, result.problem
    found = [_moved(result, best, changed) for changed in _moves(best.layout)]
    for name in ("micro_batch_size", "recompute", "zero_stage", "schedule", "sequence_parallel"):
        found += [_moved(result, best, {name: value}) for value in _others(result, best.layout, name)]
    kept = [one for one in found if one.layout or one.rule]
    if problem.batch.maximum:
        # With another batch, other microbatches are what they are for.
        kept = [one for one in kept if one.layout or "batch" not in (one.rule or "")]
    sign = -1.0 if problem.objective == "throughput" else 1.0
    return sorted(
        kept,
        key=lambda one: (
            one.ratio is None or one.figure is None,
            0.0 if one.ratio is None or one.figure is None else sign * one.figure,
            one.lacks_gib or np.inf,
        ),
    )


def _moves(layout: Layout) -> list[dict[str, int]]:
    """Meshes in which one degree gives a prime factor to another."""
    found = []
    for more, less in permutations(MESH, 2):
        size = getattr(layout, less)
        if size > 1:
            factor = divisors(size)[1]
            found.append({more: getattr(layout, more) * factor, less: size // factor})
    return found


def _others(result: SearchResult, layout: Layout, name: str) -> list[object]:
    """Other values of a degree among the legal layouts of the same mesh; for numbers, only the next ones."""
    column = getattr(result.table, name)[
        _alike(result.table, {name: getattr(layout, name) for name in (*MESH, *EXPERTS)})
    ]
    own = code_of(name, getattr(layout, name))
    codes = np.array(distinct_numbers(column))
    if name == "micro_batch_size":
        codes = np.concatenate([codes[codes < own][-1:], codes[codes > own][:1]])
    return [value_of(name, int(code)) for code in codes if code != own]


def _alike(table: LayoutTable, degrees: Mapping[str, object]) -> Bools:
    same = np.ones(len(table), dtype=bool)
    for name, value in degrees.items():
        same &= getattr(table, name) == code_of(name, value)
    return same


def _moved(result: SearchResult, best: Plan, changed: Mapping[str, object]) -> Neighbour:
    layout = best.layout
    words = ", ".join(
        f"{SHORT.get(name, name)} {value_text(getattr(layout, name))} -> {value_text(value)}"
        for name, value in changed.items()
    )
    target = {**{name: getattr(layout, name) for name in MESH}, **changed}
    table = result.table
    same = _alike(table, target)
    places = np.flatnonzero(same[result.fitting])
    if len(places):
        there = table.layout(int(result.fitting[places[0]]))
        own = result.prices.take(result.places[places[:1]])
        ratio = float(own.tokens_per_s[0] / best.estimate.tokens_per_s)
        return Neighbour(words, there, ratio, metric(best.objective, own), None, None, None)
    if same.any():
        some = table.take(same)
        where = best.model, best.cluster, best.engine
        need = peak_memory(*where, some)
        lacks = (need.min() - best.cluster.memory_bytes) / GIB
        return Neighbour(words, some.layout(int(need.argmin())), None, None, float(lacks), None, None)
    rule, prices = _forbidden(result, layout, changed)
    if prices is None:
        return Neighbour(words, None, None, None, None, rule, None)
    were = float(prices.tokens_per_s[0] / best.estimate.tokens_per_s)
    return Neighbour(words, None, None, metric(best.objective, prices), None, rule, were)


def _forbidden(
    result: SearchResult, layout: Layout, changed: Mapping[str, object]
) -> tuple[str | None, Prices | None]:
    """The rule that forbids a change, and prices of the changed plan as if the shapes could be divided that
    way; no prices where it would not fit.
    """
    problem = result.problem
    for name in changed:
        if name in problem.pins:
            return None, None
    try:
        moved = _with_mesh(problem, layout, changed)
    except (ValidationError, InputError):
        pins = {**problem.pins, **{name: int(str(getattr(layout, name))) for name in MESH}}
        pins |= {name: int(str(value)) for name, value in changed.items()}
        try:
            return replace(problem, pins=pins).obstacle(), None
        except InputError as error:
            return str(error), None
    degrees = LayoutTable.one(moved)
    broken = [rule for rule in (*RULES, *problem.further) if bool(rule.broken(problem.model, degrees))]
    if not broken:
        return None, None
    rule = broken[0]
    prices = price(problem.model, problem.cluster, problem.engine, LayoutTable.of([moved]))
    fits = prices.peak_memory_bytes[0] <= problem.cluster.memory_bytes
    return f"{rule.name}: {rule.message(problem.model, degrees)}", prices if fits else None


def _with_mesh(problem: Problem, layout: Layout, changed: Mapping[str, object]) -> Layout:
    """The best layout with another mesh and the degrees that depend on it; raises where there is no such
    layout."""
    values: dict[str, Any] = {**layout.model_dump(), **changed}
    if values["tensor_parallel"] == 1:
        values["sequence_parallel"] = False
    if values["data_parallel"] * values["context_parallel"] == 1:
        values |= {"zero_stage": 0, "zero_replicas": 1}
    if values["context_parallel"] == 1:
        values["context_parallel_form"] = "all_gather"
    if values["pipeline_parallel"] == 1:
        values |= {"virtual_pipeline_parallel": 1, "schedule": "1f1b"}
    stages = values["pipeline_parallel"] * values["virtual_pipeline_parallel"]
    values["layers_per_stage"] = even_split(problem.model.layers, stages)
    if problem.batch.maximum:
        unit = values["micro_batch_size"] * values["data_parallel"]
        values["global_batch_size"] = max(problem.batch.size // unit, 1) * unit
    return Layout.model_validate(values)
