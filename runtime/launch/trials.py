"""Trials of plans before a job: a few steps of each on this machine."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from costmodels.errors import InputError
from planner.objective import equal_peak
from planner.plan import Plan
from runtime.job.job import Job, RunOptions
from runtime.job.measurement import Measurement, measurement
from runtime.launch.supervisor import run_job
from runtime.launch.torchrun import torchrun_command
from runtime.launch.warm_ranks import WarmRanks
from runtime.settings.checks import check_plan, check_training
from runtime.settings.training_options import OutputOptions, TrainingOptions

_ERROR = re.compile(r"^(?:\[\w+\]: ?)?([\w.]*(?:Error|Exception)\b.*)")
"""Pattern of the error line in a rank's traceback; torchrun may put the rank before it."""


@dataclass(frozen=True)
class Trial:
    """A plan that was run for a few steps."""

    plan: Plan
    measured: Measurement | None
    """Measured figures; None where the plan did not run to its end."""
    failure: str = ""
    """The reason why the trial has no figures, in one line."""

    @property
    def tokens_per_s(self) -> float:
        """Measured tokens per second; 0 for a plan that did not run."""
        return 0.0 if self.measured is None else tokens_of_step(self.plan) / self.measured.step_time_s


def try_plan(plan: Plan, iterations: int, job: Job, warm: WarmRanks | None = None) -> Trial:
    """Train `plan` for the first `iterations` steps of `job`. Nothing is loaded or saved.

    Args:
        plan: plan for the devices of this machine.
        job: job with the flags of training and data, and the time limit.
        warm: forks the ranks, if they are on a CPU.
    """
    with tempfile.TemporaryDirectory(prefix="planner-try-") as folder:
        return _trial(plan, replace(job, training=_first_steps(job.training, iterations)), Path(folder), warm)


def best_trial(trials: Sequence[Trial]) -> Trial:
    """The best trial by the plans' objective; raises `InputError` where no plan ran."""
    costs = [(_cost(trial.plan, trial.measured), trial) for trial in trials if trial.measured is not None]
    if not costs:
        raise InputError(f"none of the {len(trials)} plans ran; plan with other pins, or without --try")
    return min(costs, key=lambda one: one[0])[1]


def _first_steps(training: TrainingOptions, iterations: int) -> TrainingOptions:
    """The job of the first steps of a run, with whole batches."""
    decay = training.train_iters if training.lr_decay_iters is None else training.lr_decay_iters
    return replace(training, train_iters=iterations, lr_decay_iters=decay, rampup_batch_size=None)


def _trial(plan: Plan, job: Job, folder: Path, warm: WarmRanks | None) -> Trial:
    ranks = plan.layout.world_size
    try:
        check_plan(plan, ranks)
        check_training(plan, job.training, job.data)
    except InputError as error:
        return Trial(plan, None, str(error))
    plan_file = folder / "plan.json"
    plan.save(plan_file)
    short = Job(
        run=RunOptions(str(plan_file), job.run.distributed_timeout_minutes),
        training=job.training,
        data=job.data,
        output=OutputOptions(
            log_interval=1, eval_iters=0, log_dir=str(folder), no_history=job.output.no_history
        ),
    )
    lines: list[str] = []
    command = torchrun_command(ranks, short.arguments())
    outcome = run_job(command, ranks, folder, lines.append, lambda record: None, warm=warm)
    if outcome.exit_code:
        errors = [match[1] for match in map(_ERROR.match, lines) if match]
        what = outcome.message.partition("; all ranks were stopped")[0]
        return Trial(plan, None, f"{what}: {errors[-1]}" if errors else what)
    figures = measurement(folder)
    return Trial(plan, figures, "" if figures is not None else "it logged no step")


def tokens_of_step(plan: Plan) -> int:
    """Tokens of one step."""
    return plan.layout.global_batch_size * plan.model.seq


def _cost(plan: Plan, figures: Measurement) -> tuple[float, ...]:
    """Measured figures that the objective of the plan minimises; the first decides."""
    slowness = figures.step_time_s / tokens_of_step(plan)
    if plan.objective == "memory":
        return equal_peak(figures.peak_memory_bytes), slowness
    return (figures.step_time_s if plan.objective == "step-time" else slowness,)
