"""The fate of one layout in a search: first, slower, too big, or illegal, with the reason."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import ValidationError

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.pricing import price
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB
from costmodels.spec.table import ARRAY_FIELDS, Bools, LayoutTable, code_of
from planner.explanation.comparison import Comparison, compare
from planner.inputs.batch import Batch
from planner.inputs.choice import Choice
from planner.inputs.engine import resolve_precision
from planner.inputs.pin_notation import pin_text
from planner.inputs.pins import PinInput, Pins, WherePossible, parse_pins
from planner.objective import EQUAL, logarithms
from planner.plan import Plan
from planner.preference import FASTEST
from planner.problem import Problem
from planner.ranking import reasons
from planner.ranking.ranking import rank
from planner.ranking.reasons import lead_text
from planner.ranking.result import SearchResult
from planner.space.grid import SINGLE_VALUES, Space
from planner.space.rules import RULES

Outcome = Literal["first", "slower", "too_big", "illegal"]

SOLVED_COLUMNS = (
    "split",
    "recompute",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    "zero_replicas",
)
"""Columns of a table that the search solves for the best layouts, besides enumerating some values."""


@dataclass(frozen=True)
class Verdict:
    """The fate in a search of the layouts with given degrees, and of the best of them."""

    degrees: str
    """The given degrees, in the words of the question."""
    outcome: Outcome
    reason: str
    """The reason in one line, with its numbers."""
    rules: dict[str, int]
    """Numbers of layouts with these degrees by the rule that removed them before pricing."""
    legal: int
    """Number of legal layouts with these degrees."""
    feasible: int
    """Number of matching layouts that fit into memory."""
    plan: Plan | None
    """The best matching layout that fits, or the smallest if none fits; None where none is legal."""
    place: int | None
    """The place in the ranking, from 1; for a layout that was not searched, the place that it would have.
    None if it does not fit."""
    not_searched: str | None
    """The reason why the search does not rank the layout although it is legal; None where it does."""
    comparison: Comparison | None
    """The winner of the search against the layout, if both fit."""


def parse_layout(given: PinInput) -> Pins:
    """Degrees of a layout by full name: a mapping, strings `name=value`, or the text of `Layout.describe`.

    Several degrees in one string have commas or blanks between them: `tp=8+sp pp=2 mbs=1 x 4`. Raises
    `InputError` for any other text.
    """
    try:
        degrees = parse_pins(given)
    except InputError as error:
        raise InputError(f"layout: {str(error).removeprefix('pin ')}") from None
    if not degrees:
        raise InputError("layout: no degrees given; expected some, such as tp=8,pp=2")
    return degrees


def outcome_of(result: SearchResult, layout: PinInput) -> Verdict:
    """The fate of `layout` in the search of `result`; degrees that are not given get their best values.

    Raises `InputError` for a wrong layout.
    """
    degrees = parse_layout(layout)
    asked = _asked(degrees)
    problem = _with_degrees(result.problem, degrees)
    try:
        space = problem.space()
    except InputError as error:
        return _illegal(asked, str(error), {})
    if not len(space.table):
        return _illegal(asked, problem.obstacle(), dict(space.illegal))
    return _priced(result, problem, space, asked)


def _illegal(asked: str, reason: str, rules: dict[str, int]) -> Verdict:
    return Verdict(asked, "illegal", reason, rules, 0, 0, None, None, None, None)


def _priced(result: SearchResult, problem: Problem, space: Space, asked: str) -> Verdict:
    # The last resort is for a search in which nothing fits, not for one layout of many.
    # A layout is judged by the best that its degrees allow, not by the simplest that comes near.
    by_speed = replace(problem, preference=FASTEST)
    found = rank(by_speed, space, time.perf_counter(), offload=result.offloads)
    plan = found.plan(0)
    if result.best is not None and found.feasible and _same(found, result.best.layout, ARRAY_FIELDS).any():
        # The first of all layouts is the first of these, whatever they are compared with.
        plan = result.best
    place = place_of(result, plan) if found.feasible else None
    comparison = None
    outcome: Outcome = "slower"
    if place is None:
        outcome, reason = "too_big", f"{reasons.memory_reason(plan.estimate, plan.cluster)}: {_held(plan)}"
    elif result.best is None or plan.layout == result.best.layout:
        # A faster plan that ties may stand behind it.
        is_fastest = result.best is None or not result.first_faster
        outcome, reason = "first", "nothing that fits is better" if is_fastest else result.plan(0).reason
    else:
        comparison = compare(result.best, plan)
        reason = result.reason_behind((plan.layout, plan.estimate))
        if place == 1:
            better = lead_text(problem.objective, plan.estimate, result.best.estimate)
            outcome, reason = "first", f"would be first: {better} the best that was searched"
    return Verdict(
        degrees=asked,
        outcome=outcome,
        reason=reason,
        rules=dict(space.illegal),
        legal=found.legal,
        feasible=found.feasible,
        plan=plan,
        place=place,
        not_searched=_why_not_searched(result, plan.layout),
        comparison=comparison,
    )


def _asked(degrees: Pins) -> str:
    """The degrees in words; a whole layout in its own notation."""
    if Layout.model_fields.keys() - {"context_parallel_form", "recompute_modules"} <= degrees.keys():
        try:
            return Layout.model_validate(degrees).describe()
        except ValidationError:
            pass  # Degrees that contradict each other, which is what the verdict says.
    return ", ".join(pin_text(name, value) for name, value in degrees.items())


def _with_degrees(problem: Problem, degrees: Pins) -> Problem:
    """The problem with `degrees` pinned, instead of other pins of the same names."""
    pins = dict(degrees)
    wanted = pins.pop("precision", None)
    size = pins.pop("global_batch_size", None)
    precision = problem.precision
    if wanted is not None:
        precision = resolve_precision(str(wanted), problem.cluster.device, problem.engine)
    return replace(
        problem,
        pins={**problem.pins, **pins},
        precision=precision,
        batch=problem.batch if size is None else Batch(int(str(size))),
    )


def place_of(result: SearchResult, plan: Plan) -> int:
    """Place of `plan`, which must fit, in the ranking of `result`, from 1; if it is not in the ranking, the
    place that it would have."""
    rows = np.flatnonzero(_same(result, plan.layout, ARRAY_FIELDS))
    places = np.flatnonzero(np.isin(result.fitting, rows))
    if len(places):
        return 1 + int(places[0])
    problem = result.problem
    own = price(problem.model, problem.cluster, problem.engine, LayoutTable.of([plan.layout]))
    ranked, asked = (
        logarithms(problem.objective, prices) for prices in (result.prices, own.simulate(np.array([0])))
    )
    better, equal = np.zeros(len(result.prices), dtype=bool), np.ones(len(result.prices), dtype=bool)
    for theirs, mine in zip(ranked, asked, strict=True):
        better |= equal & (theirs < mine[0] - EQUAL)
        equal &= np.abs(theirs - mine[0]) <= EQUAL
    return 1 + int(np.count_nonzero(better))


def _same(result: SearchResult, layout: Layout, names: Iterable[str]) -> Bools:
    """Mask of the legal layouts of the search with the same values in the columns `names`, [n]."""
    table = result.table
    splits = [at for at, split in enumerate(table.splits) if split == layout.layers_per_stage]
    alike = all(getattr(layout, name) == value for name, value in table.formats.items())
    same = np.full(len(table), alike)
    for name in names:
        own = splits if name == "split" else [code_of(name, getattr(layout, name))]
        same &= np.isin(getattr(table, name), own)
    return same


def _why_not_searched(result: SearchResult, layout: Layout) -> str | None:
    """The reason why a legal layout is not in a search; None where it is in."""
    problem = result.problem
    for name, value in problem.pins.items():
        if isinstance(value, WherePossible):
            continue
        own = getattr(layout, name)
        if not (own in value if isinstance(value, Choice) else value == own):
            return f"the search is pinned to {pin_text(name, value)}"
    if layout.precision != problem.precision:
        return f"the search is for {problem.precision}, not {layout.precision}"
    degrees = LayoutTable.one(layout)
    for rule in (*RULES, *problem.further):
        lifted = rule.is_lifted(problem.pins.keys())
        if rule.redundant and not lifted and bool(rule.broken(problem.model, degrees)):
            return f"{rule.name}: {rule.message(problem.model, degrees)}"
    # Solved degrees are tried where they could lead to the top.
    if _same(result, layout, [name for name in ARRAY_FIELDS if name not in SOLVED_COLUMNS]).any():
        return None
    for name, usual in SINGLE_VALUES.items():
        if name not in problem.pins and getattr(layout, name) != usual:
            return f"the search leaves {pin_text(name, usual)} unless it is pinned"
    return "the search does not try such values; pin them"


def _held(plan: Plan) -> str:
    """A text of the parts of the fullest pipeline rank's memory, largest first."""
    stage = max(plan.estimate.memory, key=lambda each: each.total)
    parts = sorted(stage.model_dump().items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {held / GIB:.1f}" for name, held in parts if held >= 0.05 * GIB)
