"""Measuring plans before a job: a few steps of each on this machine, of which the best is kept."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cli.tables import drawn, table
from costmodels.errors import InputError
from costmodels.words import GIB
from planner.flags import arguments, flag
from planner.numbers import MOST_STEPS, Bounds, check_bounds
from planner.objective import Objective, equal_peak
from planner.plan import Plan
from runtime.launch.torchrun import Measured, measured, run_job, torchrun_command
from runtime.launch.warm_ranks import WarmRanks
from runtime.logs.console import say
from runtime.settings.options import DataOptions, OutputOptions, TrainingOptions
from runtime.settings.preflight import check_plan, check_training

BEST: dict[Objective, str] = {
    "throughput": "fastest",
    "step-time": "shortest step",
    "cost": "fastest",
    "memory": "lowest peak",
}
"""What the table of trials says of the plan that is kept, by its objective."""

FEWEST_ITERS = 2
"""Steps of a trial at least: the first one warms up and does not count."""

_ERROR = re.compile(r"^(?:\[\w+\]: ?)?([\w.]*(?:Error|Exception)\b.*)")
"""The line of a rank's traceback that says what went wrong; torchrun may put the rank before it."""


@dataclasses.dataclass(frozen=True)
class TrialOptions:
    """How plans are tried before the job starts."""

    SECTIONS: ClassVar[dict[str, str]] = {"plans_to_try": "Job"}

    plans_to_try: int | None = flag(
        None,
        "Measure the first N plans for a few steps each on this machine, and train with the one that "
        "--objective likes best.",
        "--try",
        metavar="N",
        within=Bounds("a number of plans of at least 1", 1),
    )
    try_iters: int | None = flag(
        None,
        "With --try: steps of each plan, of which the first warms up; 5.",
        within=Bounds(f"at least {FEWEST_ITERS} steps", FEWEST_ITERS, MOST_STEPS),
    )

    def check(self, plan: str | None, dry_run: bool) -> None:
        """Raise `InputError` for numbers that are none, and beside flags that leave nothing to try."""
        check_bounds(self)
        if self.plans_to_try is None:
            if self.try_iters is not None:
                raise InputError(f"--try-iters {self.try_iters} needs --try, the number of plans to measure")
            return
        if plan is not None:
            raise InputError(
                f"--try {self.plans_to_try} chooses among plans, and --plan {plan} is one; give either"
            )
        if dry_run:
            raise InputError(f"--try {self.plans_to_try} runs plans, and --dry-run runs none; give either")

    @property
    def iterations(self) -> int:
        """Steps of each trial."""
        return 5 if self.try_iters is None else self.try_iters


def best_of(
    plans: Sequence[Plan],
    iterations: int,
    training: TrainingOptions,
    data: DataOptions,
    arguments_of_all: Sequence[str] = (),
    warm: WarmRanks | None = None,
) -> Plan:
    """Train each of `plans` for `iterations` steps and return the one that its objective likes best.

    Prints a line for each, and measured against predicted figures. Nothing is loaded, saved or kept.

    Args:
        plans: at least one, for the devices of this machine.
        arguments_of_all: further arguments of `runtime.pretrain`.
        warm: forks the ranks, where they are on a CPU.

    Raises:
        InputError: no plan ran.
    """
    settings = [*arguments(_short(training, iterations)), *arguments(data), *arguments_of_all]
    seen: list[Measured | None] = []
    for number, plan in enumerate(plans, 1):
        say(f"try {number} of {len(plans)}: {plan.layout.describe()}")
        with tempfile.TemporaryDirectory(prefix="planner-try-") as folder:
            found = _tried(plan, training, data, settings, Path(folder), warm)
        if isinstance(found, str):
            say(f"try {number} is dropped: {found}")
        seen.append(None if isinstance(found, str) else found)
    ran = [(plan, figures) for plan, figures in zip(plans, seen, strict=True) if figures is not None]
    if not ran:
        raise InputError(f"none of the {len(plans)} plans ran; plan with other pins, or without --try")
    best = min(range(len(ran)), key=lambda at: _cost(*ran[at]))
    rows = [
        [
            str(1 + plans.index(plan)),
            f"{plan.estimate.step_time_s:.4g}",
            f"{figures.step_time_s:.4g}",
            f"{plan.estimate.step_time_s / figures.step_time_s:.2f}",
            f"{_tokens(plan) / figures.step_time_s:,.0f}",
            f"{figures.peak_memory_bytes / GIB:.3g}",
            BEST[plan.objective] if at == best else "",
        ]
        for at, (plan, figures) in enumerate(ran)
    ]
    columns = ("try", "predicted s", "measured s", "predicted / measured", "tokens/s", "peak GiB", "")
    say(drawn(table(columns, rows, left=("",))))
    return ran[best][0]


def _short(training: TrainingOptions, iterations: int) -> TrainingOptions:
    """The first steps of the same run, with whole batches."""
    decay = training.train_iters if training.lr_decay_iters is None else training.lr_decay_iters
    return dataclasses.replace(training, train_iters=iterations, lr_decay_iters=decay, rampup_batch_size=None)


def _tried(
    plan: Plan,
    training: TrainingOptions,
    data: DataOptions,
    settings: Sequence[str],
    folder: Path,
    warm: WarmRanks | None,
) -> Measured | str:
    """Figures of a trial, or why there are none."""
    ranks = plan.layout.world_size
    try:
        check_plan(plan, ranks)
        check_training(plan, training, data)
    except InputError as error:
        return str(error)
    plan_file = folder / "plan.json"
    plan.save(plan_file)
    output = OutputOptions(log_interval=1, eval_iters=0, log_dir=str(folder))
    command = torchrun_command(ranks, ["--plan", str(plan_file), *settings, *arguments(output)])
    lines: list[str] = []
    outcome = run_job(command, ranks, folder, lines.append, lambda record: None, warm=warm)
    if outcome.exit_code:
        errors = [match[1] for match in map(_ERROR.match, lines) if match]
        what = outcome.message.partition("; all ranks were stopped")[0]
        return f"{what}: {errors[-1]}" if errors else what
    return measured(folder) or "it logged no step"


def _tokens(plan: Plan) -> int:
    """Tokens of one step."""
    return plan.layout.global_batch_size * plan.model.seq


def _cost(plan: Plan, figures: Measured) -> tuple[float, ...]:
    """What the objective of the plan wants to be least, as measured; the first decides."""
    slowness = figures.step_time_s / _tokens(plan)
    if plan.objective == "memory":
        return equal_peak(figures.peak_memory_bytes), slowness
    return (figures.step_time_s if plan.objective == "step-time" else slowness,)
