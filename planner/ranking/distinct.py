"""Plans of a ranking without their twins."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from costmodels.dataclass import dataclass
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout
from planner.plan import Plan
from planner.ranking.result import SearchResult
from planner.ranking.twins import FORMS, SAME, other_form

AHEAD = 4
"""How many times as many places as plans are looked at before they are settled."""


@dataclass(frozen=True)
class DistinctPlan:
    """A plan at a place of the ranking that stands for its twins too."""

    place: int
    """In the ranking, from 1; its twins have the next ones."""
    plan: Plan
    twins: tuple[str, ...] = ()
    """What they have instead, such as `zero 2`."""

    @property
    def note(self) -> str:
        """The twins as `= zero 2`; empty without any."""
        return f"= {' = '.join(self.twins)}" if self.twins else ""

    @property
    def note_after(self) -> str:
        """The same behind a layout, whose last words hold an equals sign."""
        return f" ({self.note})" if self.twins else ""


def distinct_plans(
    result: SearchResult, top: int, shows_bytes: bool = True
) -> tuple[SearchResult, list[DistinctPlan]]:
    """The result, settled as far as needed, and its best `top` plans that are twins of no better one.

    Args:
        shows_bytes: as `SearchResult.settle` takes it.
    """
    count = _reach(result, top)
    while True:
        result = result.settle(count, shows_bytes)
        found = _grouped(result, min(count, result.ranked))
        # One more than is shown, so that the last has all its twins.
        if len(found) > top or count >= result.ranked:
            return result, found[:top]
        count += top + 1 - len(found)


def _reach(result: SearchResult, top: int) -> int:
    """How many places hold more than `top` plans by prices that are not settled yet: to settle places again
    and again takes longer than all at once."""
    prices = result.first(AHEAD * top)
    plain = dict.fromkeys(FORMS)
    seen: set[tuple[object, str]] = set()
    for count, seconds in enumerate(prices.step_time_s.tolist(), 1):
        seen.add((prices.table.layout(count - 1).model_copy(update=plain), f"{seconds:.8e}"))
        if len(seen) > top:
            return count
    return top + 1


def _grouped(result: SearchResult, count: int) -> list[DistinctPlan]:
    """The first `count` places, twins with the first of them."""
    found: list[DistinctPlan] = []
    alike = 0
    """Plans at the end of `found` that are as fast as the last one."""
    for rank in range(count):
        plan = result.plan(rank)
        if not (found and isclose(_speed(found[-1].plan), _speed(plan), rel_tol=SAME)):
            alike = 0
        for number in range(len(found) - alike, len(found)):
            form = other_form(_priced(found[number].plan), _priced(plan))
            if form is not None:
                found[number] = replace(found[number], twins=(*found[number].twins, form))
                break
        else:
            found.append(DistinctPlan(rank + 1, plan))
            alike += 1
    return found


def _speed(plan: Plan) -> float:
    return plan.estimate.tokens_per_s


def _priced(plan: Plan) -> tuple[Layout, Estimate]:
    return plan.layout, plan.estimate
