"""Trials of plans, in an order decided by earlier measurements, until the best plan is certain enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.plan import Plan
from planner.ranking.measured_order import Expected, expected_steps
from runtime.launch.trials import Trial, best_trial, tokens_of_step

SETTLED = 0.01
"""Share by which another plan may still be faster when trials end."""

POOL = 4
"""Number of candidate plans for each plan that may be measured."""


@dataclass(frozen=True)
class TrialSeries:
    """Measured plans, and the expected figures of the others."""

    trials: tuple[Trial, ...]
    """The trials in the order in which they ran."""
    best: Trial
    untried: tuple[tuple[Plan, Expected], ...]
    """Plans that were not measured, the most promising first."""
    regret: float | None
    """Share by which the best other plan may be faster than the kept one, with 95 % confidence. None if the
    objective is not time."""

    @property
    def settled(self) -> bool:
        """True if no other plan is likely to be better."""
        return self.regret is not None and self.regret <= SETTLED

    def describe(self) -> str:
        """A sentence on the time that unmeasured plans may still save."""
        if not self.untried:
            return "all plans were measured: no regret remains"
        others = f"the {len(self.untried)} plans that were not measured"
        if self.regret is None:
            return f"{others} are predicted to need more memory"
        return f"regret: at most {100 * self.regret:.1f} % against {others}, 19 times of 20"

    def as_json(self) -> dict[str, Any]:
        """The trials as JSON; times are seconds of a step."""
        return {
            "kept": self.best.plan.layout.describe(),
            "settled": self.settled,
            "regret_percent": None if self.regret is None else 100 * self.regret,
            "tries": [_trial_json(trial) for trial in self.trials],
            "untried": [
                {
                    "layout": plan.layout.describe(),
                    "predicted_s": plan.estimate.step_time_s,
                    "expected_s": found.step_time_s,
                    "low_s": found.low_s,
                    "high_s": found.high_s,
                }
                for plan, found in self.untried
            ],
        }


def _trial_json(trial: Trial) -> dict[str, Any]:
    measured = trial.measured
    return {
        "layout": trial.plan.layout.describe(),
        "predicted_s": trial.plan.estimate.step_time_s,
        "measured_s": None if measured is None else measured.step_time_s,
        "tokens_per_s": trial.tokens_per_s,
        "peak_memory_bytes": None if measured is None else measured.peak_memory_bytes,
        "failure": trial.failure,
    }


def try_plans(plans: Sequence[Plan], most: int, run: Callable[[Plan], Trial]) -> TrialSeries:
    """Measure up to `most` of `plans`: the first one, then the most promising ones given the measurements.

    It ends when no other plan is likely to be faster than the best by more than `SETTLED`. Plans ranked by
    memory are measured in order, as their peaks are predicted accurately.

    Args:
        plans: the plans, the best first.

    Raises:
        InputError: no tried plan has run.
    """
    by_time = plans[0].objective != "memory"
    trials: dict[int, Trial] = {}
    while len(trials) < min(most, len(plans)):
        seen = {place: one.measured.step_time_s for place, one in trials.items() if one.measured}
        left = [place for place in range(len(plans)) if place not in trials]
        if seen and by_time:
            expected = expected_steps(plans, seen)
            if _regret(plans, seen, expected, left) <= SETTLED:
                break
            left.sort(key=lambda place: expected[place].low_s / _work(plans[place]))
        trials[left[0]] = run(plans[left[0]])
    best = best_trial(list(trials.values()))
    seen = {place: one.measured.step_time_s for place, one in trials.items() if one.measured}
    expected = expected_steps(plans, seen)
    left = [place for place in range(len(plans)) if place not in trials]
    if by_time:
        left.sort(key=lambda place: expected[place].step_time_s / _work(plans[place]))
    regret = _regret(plans, seen, expected, left) if by_time else None
    return TrialSeries(tuple(trials.values()), best, tuple((plans[p], expected[p]) for p in left), regret)


def _work(plan: Plan) -> float:
    """The divisor that makes seconds of steps comparable under a plan's objective."""
    return 1.0 if plan.objective == "step-time" else float(tokens_of_step(plan))


def _regret(
    plans: Sequence[Plan], seen: dict[int, float], expected: Sequence[Expected], left: Sequence[int]
) -> float:
    """Share by which the best of the plans in `left` may be faster than the best measured plan."""
    best = min(seconds / _work(plans[place]) for place, seconds in seen.items())
    gains = [best * _work(plans[place]) / expected[place].low_s - 1 for place in left]
    return max([0.0, *gains])
