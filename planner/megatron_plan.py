"""The plan for Megatron-LM, by its differences from the plan for the runtime of this package."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.errors import InputError, on_one_line
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB, in_seconds
from planner.api import search_problem
from planner.inputs.engine import DEFAULT_ENGINE, resolve_engine, resolve_precision
from planner.problem import Problem
from planner.processes import Calls, helpers_for
from planner.ranking.answer import answer
from planner.ranking.result import SearchResult
from planner.space.engine_rules import check_formats, check_pins
from planner.space.grid import grid
from planner.space.lora_rules import check_engine

OTHER = "megatron"
"""The engine that is shown beside this package's runtime: the most widely used one."""

RAW_LAYOUTS_PER_SECOND = 8_000_000
"""Raw layouts that a search gets through in a second, in the order of magnitude."""


@dataclass(frozen=True)
class OtherPlan:
    """The first plan of the same question for the other engine."""

    layout: Layout | None
    """The layout for Megatron-LM; None where there is none."""
    estimate: Estimate | None
    """The estimate of that layout under Megatron-LM."""
    differs: tuple[str, ...]
    """Degrees in which Megatron-LM's layout differs, with this runtime's value in brackets; empty for the
    same layout."""
    why_not: str
    """The reason why there is no plan; empty where there is one."""

    def __str__(self) -> str:
        estimate = self.estimate
        if estimate is None:
            return f"for Megatron-LM (--engine {OTHER}) there is no plan: {self.why_not}"
        cost = f"{in_seconds(estimate.step_time_s)} a step, {estimate.peak_memory_bytes / GIB:.1f} GiB"
        how = f"has {', '.join(self.differs)}" if self.differs else "is the same"
        return f"for Megatron-LM (--engine {OTHER}) the plan {how}; {cost}"

    def as_json(self) -> dict[str, Any]:
        """The plan and its differences, for programs."""
        names = ("step_time_s", "tokens_per_s", "peak_memory_bytes")
        return {
            "layout": None if self.layout is None else self.layout.model_dump(mode="json"),
            **{name: None if self.estimate is None else getattr(self.estimate, name) for name in names},
            "differs": list(self.differs),
            "why_not": self.why_not,
            "text": str(self),
        }


@dataclass(frozen=True)
class _Found:
    """The first plan for the other engine, or the reason why there is none."""

    layout: Layout | None = None
    estimate: Estimate | None = None
    why_not: str = ""


def with_other_plan(problem: Problem) -> tuple[SearchResult, OtherPlan | None]:
    """The answer to a problem, and the plan for Megatron-LM beside its first plan, searched whole.

    Both are searched at once where that takes long. The plan is None where the question is not about the
    runtime of this package, where that has no plan, and where Megatron-LM does not run on the devices.

    Raises:
        InputError: no layout is legal.
    """
    devices = {part.device.kind for part in problem.cluster.parts or (problem.cluster,)}
    if problem.engine.name != DEFAULT_ENGINE or not devices <= {*resolve_engine(OTHER).runs.devices}:
        return search_problem(problem), None
    helpers = helpers_for(2, raw_layouts(problem) / RAW_LAYOUTS_PER_SECOND)
    if not helpers:
        result = search_problem(problem)
        return result, _beside(result, _found(problem)) if result.feasible else None
    calls: list[partial[Any]] = [partial(search_problem, problem), partial(_found, problem)]
    with Calls(calls, helpers) as made:
        result, found = made.results()
    return result, _beside(result, found) if result.feasible else None


def raw_layouts(problem: Problem) -> int:
    """Layouts of the raw product of a problem's degrees, legal or not."""
    return math.prod(grid(problem.model, problem.cluster.world_size, problem.batch, problem.pins).shape)


def _beside(result: SearchResult, found: _Found) -> OtherPlan:
    """The plan for the other engine, by its differences from the first plan of `result`."""
    if found.layout is None:
        return OtherPlan(None, None, (), found.why_not)
    here = result.first(1).table.layout(0)
    return OtherPlan(found.layout, found.estimate, tuple(_differences(here, found.layout)), "")


def _found(problem: Problem) -> _Found:
    """The first plan of the same question for the other engine."""
    wordless = _wordless(problem.model)
    if wordless is not None:
        return _Found(why_not=wordless)
    try:
        found = answer(_asked_of(problem, OTHER))
    except InputError as error:
        return _Found(why_not=on_one_line(error))
    if found is None or not found.feasible:
        return _Found(why_not="no layout is legal" if found is None else "no layout fits")
    first = found.first(1)
    return _Found(first.table.layout(0), first.estimate(0))


def _wordless(model: ModelSpec) -> str | None:
    """The first part of a model that Megatron-LM does not support, with the reason; None if it supports
    all."""
    # Only questions that fit here come so far: others do without the reader of Megatron-LM's flags.
    from planner.formats.megatron.layers import BECAUSE
    from planner.formats.writing.model_words import usual_part

    for name, why in BECAUSE.items():
        value = getattr(model, name, None)
        if value is not None and value != usual_part(model, name):
            return f"it does not support {name} of {model.name}: {why}"
    return None


def _asked_of(problem: Problem, name: str) -> Problem:
    """A problem's question, asked for another engine; raises `InputError` for a job that the engine does not
    run."""
    engine = resolve_engine(name)
    # Limits of this package's runtime are no rules of other engines.
    asked = replace(problem, engine=engine, rules=())
    resolve_precision(problem.precision, problem.cluster.device, engine)
    check_pins(engine, asked.pins)
    check_formats(engine, asked.precision, asked.pins)
    check_engine(asked.model, engine)
    return asked


def _differences(here: Layout, there: Layout) -> Iterator[str]:
    """The degrees in which another layout differs, in order, with this layout's values."""
    mine, theirs = _words(here), _words(there)
    if len(here.layers_per_stage) != len(there.layers_per_stage):
        mine.pop("layers", None)  # Other stages have other layers.
    for name in dict.fromkeys([*theirs, *mine]):
        if mine.get(name) == theirs.get(name):
            continue
        if name not in theirs:
            yield "equal stages" if name == "layers" else f"no {name}={mine[name]}"
        else:
            yield f"{name}={theirs[name]}" + (f" (here {mine[name]})" if name in mine else "")


def _words(layout: Layout) -> dict[str, str]:
    """The parts of a layout's notation by the name of their degree."""
    parts = re.split(r" (?=\w+=)", layout.describe())
    return {name: value for name, _, value in (part.partition("=") for part in parts)}
