"""The trials of `planner launch --try`: a line for each, and a table of the measurements."""

from __future__ import annotations

from collections.abc import Sequence

from cli.tables import table, table_text
from costmodels.spec.record import GIB
from planner.objective import Objective
from planner.plan import Plan
from runtime.job.job import Job
from runtime.launch.trial_order import TrialSeries, try_plans
from runtime.launch.trials import Trial, try_plan
from runtime.launch.warm_ranks import WarmRanks
from runtime.logs.console import say

BEST_NAMES: dict[Objective, str] = {
    "throughput": "fastest",
    "step-time": "shortest step",
    "cost": "fastest",
    "memory": "lowest peak",
}
"""Words for the plan that is kept in the table of trials, by objective."""


def best_plan(
    plans: Sequence[Plan], iterations: int, job: Job, warm: WarmRanks | None = None, most: int | None = None
) -> TrialSeries:
    """The trials of up to `most` of `plans`, `iterations` steps of `job` each, and the one to keep.

    Args:
        plans: the plans to try, the best first.
        most: number of plans that may be measured; all unless given.

    Raises:
        InputError: no plan ran.
        Stopped: a signal has ended a trial.
    """
    most = min(len(plans), len(plans) if most is None else most)
    count = 0

    def run(plan: Plan) -> Trial:
        nonlocal count
        count += 1
        say(f"try {count} of {most}: {plan.layout.describe()}")
        trial = try_plan(plan, iterations, job, warm)
        if trial.failure:
            say(f"try {count} is dropped: {trial.failure}")
        return trial

    tries = try_plans(plans, most, run)
    rows = [
        [
            str(number),
            f"{trial.plan.estimate.step_time_s:.4g}",
            f"{trial.measured.step_time_s:.4g}",
            f"{trial.plan.estimate.step_time_s / trial.measured.step_time_s:.2f}",
            f"{trial.tokens_per_s:,.0f}",
            f"{trial.measured.peak_memory_bytes / GIB:.3g}",
            BEST_NAMES[trial.plan.objective] if trial is tries.best else "",
        ]
        for number, trial in enumerate(tries.trials, 1)
        if trial.measured is not None
    ]
    columns = ("try", "predicted s", "measured s", "predicted / measured", "tokens/s", "peak GiB", "")
    say(table_text(table(columns, rows, left=("",))))
    if tries.untried and len(tries.trials) < most:
        say(f"stopped after try {len(tries.trials)} of {most}: the order is settled")
    say(tries.describe())
    return tries
