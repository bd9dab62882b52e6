"""The trials of `planner launch --try`, a line each, and a table of what they measured."""

from __future__ import annotations

from collections.abc import Sequence

from cli.tables import table, table_text
from costmodels.spec.record import GIB
from planner.objective import Objective
from planner.plan import Plan
from runtime.job.job import Job
from runtime.launch.trials import Trial, best_trial, try_plan
from runtime.launch.warm_ranks import WarmRanks
from runtime.logs.console import say

BEST_NAMES: dict[Objective, str] = {
    "throughput": "fastest",
    "step-time": "shortest step",
    "cost": "fastest",
    "memory": "lowest peak",
}
"""What the table of trials says of the plan that is kept, by its objective."""


def best_plan(plans: Sequence[Plan], iterations: int, job: Job, warm: WarmRanks | None = None) -> Plan:
    """The one of `plans` that its objective likes best, after `iterations` steps of `job` with each.

    Raises:
        InputError: no plan ran.
        Stopped: a signal has ended a trial.
    """
    trials: list[Trial] = []
    for number, plan in enumerate(plans, 1):
        say(f"try {number} of {len(plans)}: {plan.layout.describe()}")
        trials.append(try_plan(plan, iterations, job, warm))
        if trials[-1].failure:
            say(f"try {number} is dropped: {trials[-1].failure}")
    best = best_trial(trials)
    rows = [
        [
            str(number),
            f"{trial.plan.estimate.step_time_s:.4g}",
            f"{trial.measured.step_time_s:.4g}",
            f"{trial.plan.estimate.step_time_s / trial.measured.step_time_s:.2f}",
            f"{trial.tokens_per_s:,.0f}",
            f"{trial.measured.peak_memory_bytes / GIB:.3g}",
            BEST_NAMES[trial.plan.objective] if trial is best else "",
        ]
        for number, trial in enumerate(trials, 1)
        if trial.measured is not None
    ]
    columns = ("try", "predicted s", "measured s", "predicted / measured", "tokens/s", "peak GiB", "")
    say(table_text(table(columns, rows, left=("",))))
    return best.plan
