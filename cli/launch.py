"""`planner launch`: plan for this machine, train, and compare the plan with what happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from cli.job_end import JobEnd, prediction_lines
from cli.progress import Display
from cli.status import Status
from cli.trials import best_plan
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.flags import flag_groups
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from runtime.faults.options import FaultOptions
from runtime.job.continuation import PreviousRun, previous_run
from runtime.job.job import Job
from runtime.job.plan_check import check_plan_of_job
from runtime.launch.local_plans import forks_ranks, local_plans
from runtime.launch.options import LaunchOptions, TrialOptions
from runtime.launch.preparation import (
    check_machine,
    log_dir_of,
    make_log_dir,
    prepare_data,
)
from runtime.launch.restarts import rank_arguments, run_with_restarts
from runtime.launch.supervisor import JobStopped, Outcome
from runtime.launch.torchrun import shell_line, torchrun_command
from runtime.launch.warm_ranks import WarmRanks
from runtime.logs.console import say
from runtime.processes.scheduler import check_one_task
from runtime.settings.options import DataOptions, OutputOptions, TrainingOptions
from runtime.settings.plan_notes import expert_balance_notes, optimizer_notes
from runtime.settings.preflight import check_host


@flag_groups(
    model=ModelOptions,
    cluster=ClusterOptions,
    batch=BatchOptions,
    parallel=ParallelOptions,
    training=TrainingOptions,
    data=DataOptions,
    output=OutputOptions,
    faults=FaultOptions,
    options=LaunchOptions,
    trial=TrialOptions,
)
def launch(options: LaunchOptions, trial: TrialOptions, **groups: Any) -> None:
    """Plan for this machine and train the winner on all its GPUs, or on its CPU."""
    job = Job(run=options, **groups)
    _check_flags(job, options, trial)
    with WarmRanks() as warm, Status() as status:
        if not options.dry_run:
            status.tell("planning")
        previous = previous_run(job.output)
        plans = _plans(job, previous, trial, None if options.dry_run else warm)
        plan = plans[0]
        logged = job.with_log_dir(log_dir_of(job, plan))
        check_plan_of_job(plan, logged, plan.layout.world_size)
        if options.dry_run:
            _print_command(plan, logged)
            return
        check_machine(plan, job)
        status.tell("preparing the data")
        # Last, so that a job which is refused leaves no folder of a run behind.
        prepare_data(plan, job)
        forked = warm if forks_ranks(plan) else None
        if trial.plans_to_try is not None:
            status.clear()
            plan = _best(plans, trial, job, forked)
        log_dir = make_log_dir(log_dir_of(logged, plan), is_new=job.output.log_dir is None)
        plan.save(log_dir / "plan.json")
        start = 0 if previous is None else previous.iteration
        _announce(status, plan, job, log_dir, start)
        job = job.with_plan(log_dir / "plan.json")
        outcome = _train(plan, job.with_log_dir(log_dir), options.max_restarts, status, forked)
        status.clear()
        JobEnd(plan, job, log_dir, start).print(outcome)
    if outcome.stopped_by is signal.SIGINT or outcome.exit_code:
        raise typer.Exit(outcome.exit_code or 128 + signal.SIGINT)


def _check_flags(job: Job, options: LaunchOptions, trial: TrialOptions) -> None:
    """Raise `InputError` for what needs no plan to be refused."""
    job.training.check()
    job.output.check()
    options.check(job.output)
    trial.check(options.plan, options.dry_run)
    if not options.dry_run:
        check_one_task(os.environ)
        if job.cluster.device == "cpu" and job.cluster.world_size is not None:
            check_host(job.cluster.world_size, f"--world-size {job.cluster.world_size}")


def _plans(job: Job, previous: PreviousRun | None, trial: TrialOptions, warm: WarmRanks | None) -> list[Plan]:
    """The plans to try, or the one to train; says what was assumed."""
    found = local_plans(job, previous, trial.plans_to_try or 1, warm)
    for note in found.assumptions:
        print(f"planner: assumed: {note}", file=sys.stderr)
    return found.plans


def _print_command(plan: Plan, job: Job) -> None:
    """The torchrun command that trains `plan`, or searches for it again."""
    described = job if job.run.plan is None else job.with_plan(job.run.plan)
    print(shell_line(torchrun_command(plan.layout.world_size, rank_arguments(described))))


def _best(plans: Sequence[Plan], trial: TrialOptions, job: Job, warm: WarmRanks | None) -> Plan:
    """The one of `plans` that is best on this machine."""
    try:
        return best_plan(plans, trial.iterations, job, warm)
    except JobStopped as stop:
        name = stop.number.name
        say(f"planner: stopped by {name}; all ranks have ended, and the trials left nothing", sys.stderr)
        raise typer.Exit(128 + stop.number) from None


def _announce(status: Status, plan: Plan, job: Job, log_dir: Path, start: int) -> None:
    """Say what is trained from iteration `start` on, what the plan promises, and where its files are."""
    ranks, device = plan.layout.world_size, plan.cluster.device.name
    status.line(f"{plan.model.name} on {ranks} x {device}: {plan.layout.describe()}")
    for line in prediction_lines(plan, max(0, job.training.train_iters - start)):
        status.line(line)
    for note in (*expert_balance_notes(plan, job.training), *optimizer_notes(plan, job.parallel)):
        status.line(f"note: {note}")
    status.line(f"plan, metrics and output are in {log_dir}")


def _train(plan: Plan, job: Job, restarts: int, status: Status, warm: WarmRanks | None) -> Outcome:
    """Train to the end, and show meanwhile how far it is."""
    status.tell(f"starting {plan.layout.world_size} ranks")
    display = Display(status, job.training.train_iters)
    try:
        outcome = run_with_restarts(plan, job, restarts, display, warm)
    except JobStopped as stop:
        outcome = Outcome(128 + stop.number, "", stopped_by=stop.number)
    display.end()
    return outcome
