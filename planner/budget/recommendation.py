"""The recommended size of several sizes of a cluster, and the reason for it.

With a deadline it is the cheapest size in time; with a budget the fastest affordable size; without either the
knee of days against cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from costmodels.dataclass import dataclass
from planner.budget.goal import Goal, late_text
from planner.budget.money import money_text
from planner.budget.run import Run
from planner.budget.words import DAY, duration, scaled_number

FAIR = 1.0
"""Per cent of the days that the next larger size must save for each per cent of added cost.

Twice the devices at 1.5 times the speed are exactly 1: a third less days for a third more cost.
"""

Rule = Literal["deadline", "budget", "deadline and budget", "objective", "knee"]

Best = Callable[[Collection[int]], int]
"""The best of some sizes by an objective."""


@dataclass(frozen=True)
class Recommendation:
    """The recommended size, with the reason."""

    world_size: int
    rule: Rule
    keeps_goal: bool
    """True if the run keeps the deadline and the budget, or there are none."""
    why: str
    """The reason for the recommendation: one sentence with its numbers."""


def recommend(
    runs: Mapping[int, Run], goal: Goal, by_objective: tuple[str, Best] | None = None
) -> Recommendation | None:
    """The recommended size among those that have a plan; None where none has.

    Args:
        runs: runs of the same tokens by the number of devices, ascending.
        goal: limits that the run must keep.
        by_objective: an objective other than speed in words, and the best of some sizes by it.
    """
    if not runs:
        return None
    rule = _rule(goal)
    kept = {size: run for size, run in runs.items() if goal.is_kept(run)}
    if not kept:
        size, why = _closest(runs, goal)
        return Recommendation(size, rule, False, why)
    if by_objective is not None:
        words, best = by_objective
        size = best(kept)
        of = f" of {_sizes(kept)} that {goal.describe(_verbs(kept))}" if goal.is_given else ""
        why = f"it is the best by {words}{of}"
        return Recommendation(size, rule if goal.is_given else "objective", True, why)
    if goal.is_given:
        size = min(kept, key=_hours(kept) if goal.deadline_days is not None else _days(kept))
        return Recommendation(size, rule, True, _within(runs, kept, goal, size))
    size, why = knee(runs)
    return Recommendation(size, "knee", True, why)


def front(runs: Mapping[int, Run]) -> list[int]:
    """The Pareto-optimal sizes, the cheapest and slowest first: no other size is both faster and cheaper."""
    found = [
        size
        for size, run in runs.items()
        if not any(
            other.days <= run.days
            and other.device_hours <= run.device_hours
            and (other.days, other.device_hours) != (run.days, run.device_hours)
            for other in runs.values()
        )
    ]
    return sorted(found, key=lambda size: (runs[size].device_hours, size))


def knee(runs: Mapping[int, Run]) -> tuple[int, str]:
    """The last size on the front that pays off against the one before it, and the reason.

    Sizes are compared from the cheapest on. A faster size pays off if its share of saved days is at least
    `FAIR` times its share of added cost. A size that does not pay off is skipped.
    """
    path = front(runs)
    taken = [path[0]]
    for size in path[1:]:
        saved, added = _step(runs, taken[-1], size)
        if saved >= FAIR * added:
            taken.append(size)
    chosen = taken[-1]
    later = path[path.index(chosen) + 1 :]
    if later:
        steps = [(size, *_step(runs, chosen, size)) for size in later]
        after, saved, added = max(steps, key=lambda step: step[1] / step[2])
        return chosen, (
            f"it is the knee of days against cost: {after} devices would save {_share(saved)} of the days "
            f"and add {_share(added)} to the cost, and a step has to save as large a share as it adds"
        )
    if len(taken) == 1:
        if len(runs) == 1:
            return chosen, "it is the only size with a plan"
        more = "; more devices may still pay" if chosen == max(runs) else ""
        return chosen, f"no other size here is faster or cheaper{more}"
    saved, added = _step(runs, taken[-2], chosen)
    return chosen, (
        f"days against cost have no knee up to here: its step from {taken[-2]} devices saves {_share(saved)} "
        f"of the days and adds {_share(added)} to the cost; more devices may still pay"
    )


def _step(runs: Mapping[int, Run], one: int, other: int) -> tuple[float, float]:
    """The share of days that the next size saves, and the share of cost that it adds."""
    return (
        1.0 - runs[other].days / runs[one].days,
        runs[other].device_hours / runs[one].device_hours - 1.0,
    )


def _rule(goal: Goal) -> Rule:
    if goal.budget is None:
        return "deadline"
    return "budget" if goal.deadline_days is None else "deadline and budget"


def _within(runs: Mapping[int, Run], kept: Mapping[int, Run], goal: Goal, size: int) -> str:
    """The reason for a size among those that keep the goal."""
    run = runs[size]
    best = "cheapest" if goal.deadline_days is not None else "fastest"
    which = f"the {best} of {_sizes(kept)} that" if len(kept) > 1 else "the only size that"
    why = f"it is {which} {goal.describe(_verbs(kept) if len(kept) > 1 else ('takes', 'costs'))}"
    if goal.deadline_days is None or run.days_high <= goal.deadline_days:
        return why
    sure = {
        other: each
        for other, each in kept.items()
        if each.days_high <= goal.deadline_days and each.days < run.days
    }
    if not sure:
        return f"{why}; {late_text(run)}, and no size here within the goal is in time even then"
    return f"{why}; {late_text(run)}: {min(sure, key=_hours(sure))} devices are in time even then"


def _closest(runs: Mapping[int, Run], goal: Goal) -> tuple[int, str]:
    """The size that misses the goal by least, and the words for that."""
    none = f"no size here keeps the goal to {goal.describe()}: "
    in_time = {size: run for size, run in runs.items() if goal.is_in_time(run)}
    if goal.deadline_days is not None and not in_time:
        size = min(runs, key=_days(runs))
        return size, f"{none}{size} devices come closest, with {duration(runs[size].days * DAY)}"
    size = min(in_time, key=_hours(in_time))
    cheapest = "of those that are in time " if goal.deadline_days is not None else ""
    return size, f"{none}{cheapest}{size} devices cost least, {_cost(runs[size])}"


def _days(runs: Mapping[int, Run]) -> Callable[[int], tuple[float, float]]:
    return lambda size: (runs[size].days, runs[size].device_hours)


def _hours(runs: Mapping[int, Run]) -> Callable[[int], tuple[float, float]]:
    return lambda size: (runs[size].device_hours, runs[size].days)


def _cost(run: Run) -> str:
    if run.money is None:
        return f"{scaled_number(run.device_hours)} device-hours"
    return money_text(run.money, run.currency)


def _sizes(some: Collection[int]) -> str:
    return f"{len(some)} size{'s' * (len(some) > 1)}"


def _verbs(some: Collection[int]) -> tuple[str, str]:
    return ("take", "cost") if len(some) > 1 else ("takes", "costs")


def _share(share: float) -> str:
    """A share in per cent, with one decimal if it is small."""
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1g} %"
