"""Plans of a ranking without their twins."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from costmodels.dataclass import dataclass
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout
from planner.plan import Plan
from planner.ranking.result import SearchResult
from planner.ranking.twins import SAME, other_form


@dataclass(frozen=True)
class DistinctPlan:
    """A plan at a place of the ranking that also represents its twins."""

    place: int
    """The place in the ranking, from 1; the plan's twins have the next ones."""
    plan: Plan
    twins: tuple[str, ...] = ()
    """Differences of the twins from the plan, such as `zero 2`."""

    @property
    def note(self) -> str:
        """The twins as `= zero 2`; empty without any."""
        return f"= {' = '.join(self.twins)}" if self.twins else ""

    @property
    def note_after(self) -> str:
        """The twins as ` (= zero 2)`, behind a layout whose last words hold an equals sign."""
        return f" ({self.note})" if self.twins else ""


def distinct_plans(result: SearchResult, top: int) -> list[DistinctPlan]:
    """The best `top` plans, without twins of better plans."""
    count = top + 1
    while True:
        found = _grouped(result, min(count, result.feasible))
        # One more than is shown, so that the last has all its twins.
        if len(found) > top or count >= result.feasible:
            return found[:top]
        count += top + 1 - len(found)


def _grouped(result: SearchResult, count: int) -> list[DistinctPlan]:
    """The first `count` places, grouped so that twins are together."""
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
