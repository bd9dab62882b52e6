"""Two plans side by side: each term of their step time and of their memory."""

from __future__ import annotations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import price
from costmodels.spec.estimate import Estimate, StageMemory, StepTime
from costmodels.spec.table import LayoutTable
from planner.plan import Plan
from planner.ranking.ties import are_told_apart

ORDER_DIGITS = 8
"""Digits to which a ratio of throughputs counts; smaller differences are rounding errors."""


@dataclass(frozen=True)
class Term:
    """One part of the cost of both plans."""

    name: str
    """A field of `StepTime` or of `StageMemory`."""
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Seconds or bytes of the second plan minus those of the first."""
        return self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """A plan against another one of the same problem."""

    first: Plan
    second: Plan
    throughput: float
    """Tokens per second of the first plan over those of the second."""
    distinguishable: bool
    """True if the order is sure enough: the slower plan has a small enough chance to be the faster one."""
    time: tuple[Term, ...]
    """Seconds for the tokens of a step of the first plan, the largest difference first; they add up."""
    memory: tuple[Term, ...]
    """Bytes of the fullest pipeline rank of either plan, the largest difference first."""


def compare(first: Plan, second: Plan) -> Comparison:
    """The terms of two plans, which must be of the same model, side by side."""
    one, other = first.estimate, second.estimate
    scale = first.layout.global_batch_size / second.layout.global_batch_size
    return Comparison(
        first=first,
        second=second,
        throughput=round(one.tokens_per_s / other.tokens_per_s, ORDER_DIGITS),
        distinguishable=_distinguishable(first, second),
        time=_terms(tuple(StepTime.model_fields), one.time, other.time, scale),
        memory=_terms(tuple(StageMemory.model_fields), fullest(one), fullest(other)),
    )


def fullest(estimate: Estimate) -> StageMemory:
    """Memory of the pipeline rank that needs the most."""
    return max(estimate.memory, key=lambda stage: stage.total)


def _terms(
    names: tuple[str, ...], first: StepTime | StageMemory, second: StepTime | StageMemory, scale: float = 1.0
) -> tuple[Term, ...]:
    """The terms of both plans, those of the second plan times `scale`."""
    terms = [Term(name, getattr(first, name), getattr(second, name) * scale) for name in names]
    held = [term for term in terms if term.first or term.second]
    return tuple(sorted(held, key=lambda term: -abs(term.difference)))


def _distinguishable(first: Plan, second: Plan) -> bool:
    if first.cluster != second.cluster or first.engine != second.engine:
        # Estimates on different clusters do not err together.
        one, other = first.estimate, second.estimate
        scale = first.layout.global_batch_size / second.layout.global_batch_size
        lowest, highest = scale * other.step_time_low_s, scale * other.step_time_high_s
        return one.step_time_high_s < lowest or one.step_time_low_s > highest
    return _separated(first, second)


def _separated(first: Plan, second: Plan) -> bool:
    one, other = (
        price(first.model, first.cluster, first.engine, LayoutTable.of([plan.layout])).simulate(np.array([0]))
        for plan in (first, second)
    )
    return are_told_apart(one, other)
