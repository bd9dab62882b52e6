"""`planner launch`: plan for this machine, train, and compare the plan with the measured run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from cli.differences import print_differences
from cli.job_end import JobEnd, prediction_lines
from cli.launch_nodes import launch_node
from cli.progress import Display
from cli.proof import proven_plan
from cli.status import Status
from cli.trial_table import best_plan
from costmodels.errors import InputError
from costmodels.files import write_whole
from planner.inputs.device import is_cpu
from planner.options.flags import flag_groups, groups_of
from planner.plan import Plan
from planner.service.plan_notes import optimizer_notes
from runtime.job.continuation import PreviousRun, previous_run
from runtime.job.job import Job
from runtime.job.job_folders import check_save, iteration_of
from runtime.job.plan_check import check_plan_of_job
from runtime.job.resumption import from_saved, has_saved
from runtime.launch.launch_options import LaunchOptions, TrialOptions
from runtime.launch.local_plans import forks_ranks, local_configuration, local_plans
from runtime.launch.nodes import nodes_of_job
from runtime.launch.other_software import script_run
from runtime.launch.preparation import (
    check_machine,
    log_dir_of,
    make_log_dir,
    prepare_data,
)
from runtime.launch.restarts import rank_arguments, run_with_restarts
from runtime.launch.supervisor import JobStopped, Outcome
from runtime.launch.torchrun import shell_line, torchrun_command
from runtime.launch.trial_order import POOL, TrialSeries
from runtime.launch.warm_ranks import WarmRanks
from runtime.logs.console import say
from runtime.processes.start_variables import is_restarted
from runtime.settings.checks import check_host
from runtime.settings.plan_notes import expert_balance_notes

TRIES_FILE = "tries.json"
"""The file of `--try` measurements in the folder of the run."""


@flag_groups(**groups_of(Job, but=("run",)), options=LaunchOptions, trial=TrialOptions)
def launch(options: LaunchOptions, trial: TrialOptions, **groups: Any) -> None:
    """Plan for this machine and train the winner on all its GPUs, or on its CPU."""
    job = Job(run=options, **groups)
    nodes = nodes_of_job(options, os.environ)
    _check_flags(job, options, trial, is_alone=nodes is None)
    if options.script is not None:
        raise typer.Exit(_run_script(job, options))
    if nodes is not None and options.config:
        raise InputError(
            "--config trains on one machine; save its plan with planner check --save, and give that"
        )
    if nodes is not None:
        leave(launch_node(job, options, trial, nodes))
        return
    with WarmRanks() as warm, Status() as status:
        if not options.print_command:
            status.tell("planning")
        if is_restarted() and has_saved(job):
            job = from_saved(job)  # A scheduler has started it again, after it had saved.
        previous = previous_run(job.output)
        ready = None if options.print_command else warm
        if options.config:
            configured = local_configuration(job, options, ready)
            job, plans = configured.job, [configured.plan]
            status.clear()
            print_differences(configured)
        else:
            plans = _plans(job, previous, trial, ready)
        plan = plans[0]
        if trial.plans_to_try is None and not options.print_command:
            plan = _proven(plans, job, previous, options, status)
        logged = job.with_log_dir(log_dir_of(job, plan))
        check_plan_of_job(plan, logged, plan.layout.world_size)
        if options.print_command:
            if not options.config:
                _print_command(plan, logged)
            return
        check_machine(plan, job)
        status.tell("preparing the data")
        # Last, so that a job which is refused leaves no folder of a run behind.
        prepare_data(plan, job)
        forked = warm if forks_ranks(plan) else None
        tries = None
        if trial.plans_to_try is not None:
            status.clear()
            tries = _tries(plans, trial, job, forked)
            plan = tries.best.plan
        log_dir = make_log_dir(log_dir_of(logged, plan), is_new=job.output.log_dir is None)
        plan.save(log_dir / "plan.json")
        if tries is not None:
            write_whole("trials", log_dir / TRIES_FILE, json.dumps(tries.as_json(), indent=2) + "\n")
        start = 0 if previous is None else previous.iteration
        _announce(status, plan, job, log_dir, start)
        job = job.with_plan(log_dir / "plan.json")
        outcome = _train(plan, job.with_log_dir(log_dir), options.max_restarts, status, forked)
        status.clear()
        JobEnd(plan, job, log_dir, start).print(outcome)
    leave(outcome)


def _run_script(job: Job, options: LaunchOptions) -> int:
    """Run a script of other software with a plan; return its exit code."""
    folder = Path(
        job.output.log_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-{Path(str(options.script)).stem}"
    )
    run = script_run(job, options, folder)
    for note in run.notes:
        print(f"planner: {note}", file=sys.stderr)
    if options.print_command:
        print(run.line())
        return 0
    print(f"layout: {run.plan.layout.describe()}", flush=True)
    return run.run()


def leave(outcome: Outcome | None) -> None:
    """Leave with the exit code of a job; None where none was run.

    A job that saved after SIGTERM, or after its terminal was closed, ended as asked: exit code 0.
    """
    if outcome is not None and (outcome.exit_code or outcome.stopped_by is signal.SIGINT):
        raise typer.Exit(outcome.exit_code or 128 + signal.SIGINT)


def _check_flags(job: Job, options: LaunchOptions, trial: TrialOptions, is_alone: bool) -> None:
    """Raise `InputError` for flags that can be refused without a plan."""
    job.training.check()
    job.output.check()
    if not is_restarted():
        check_save(job.output)
        iteration_of(job.output)
    options.check(job.output)
    trial.check(options.plan, options.print_command)
    job.preflight.check(options.plan)
    if job.preflight.replan and is_alone:
        raise InputError(
            "--replan is for ranks that plan themselves, on several nodes or with torchrun -m "
            "runtime.pretrain; "
            "on one machine --try measures plans"
        )
    ranks = job.cluster.world_size
    if is_alone and not options.print_command and ranks is not None and is_cpu(job.cluster.device):
        check_host(ranks, f"--world-size {ranks}")


def _plans(job: Job, previous: PreviousRun | None, trial: TrialOptions, warm: WarmRanks | None) -> list[Plan]:
    """The plans to try, or the one to train; also prints the assumptions."""
    count = 1 if trial.plans_to_try is None else POOL * trial.plans_to_try
    found = local_plans(job, previous, count, warm)
    for note in found.assumptions:
        print(f"planner: assumed: {note}", file=sys.stderr)
    return found.plans


def _proven(
    plans: Sequence[Plan], job: Job, previous: PreviousRun | None, options: LaunchOptions, status: Status
) -> Plan:
    """The first of the plans that fits by its dry run."""
    is_given = options.config or job.run.plan is not None

    def more(count: int) -> Sequence[Plan]:
        return plans if is_given else local_plans(job, previous, count, None).plans

    return proven_plan(plans, more, options.traces_memory, job.training, status)


def _print_command(plan: Plan, job: Job) -> None:
    """Print the torchrun command that trains `plan`, or that searches for it again."""
    described = job if job.run.plan is None else job.with_plan(job.run.plan)
    print(shell_line(torchrun_command(plan.layout.world_size, rank_arguments(described))))


def _tries(plans: Sequence[Plan], trial: TrialOptions, job: Job, warm: WarmRanks | None) -> TrialSeries:
    """The trials that find the best of `plans` on this machine."""
    try:
        return best_plan(plans, trial.iterations, job, warm, trial.plans_to_try)
    except JobStopped as stop:
        name = stop.number.name
        say(f"planner: stopped by {name}; all ranks have ended, and the trials left nothing", sys.stderr)
        raise typer.Exit(128 + stop.number) from None


def _announce(status: Status, plan: Plan, job: Job, log_dir: Path, start: int) -> None:
    """Print the job that is trained from iteration `start` on, the plan's predictions, and the places of its
    files."""
    ranks, device = plan.layout.world_size, plan.cluster.device.name
    status.line(f"{plan.model.name} on {ranks} x {device}: {plan.layout.describe()}")
    for line in prediction_lines(plan, max(0, job.training.train_iters - start)):
        status.line(line)
    for note in (*expert_balance_notes(plan, job.training), *optimizer_notes(plan, job.parallel)):
        status.line(f"note: {note}")
    status.line(f"plan, metrics and output are in {log_dir}")


def _train(plan: Plan, job: Job, restarts: int, status: Status, warm: WarmRanks | None) -> Outcome:
    """Train to the end, and show the progress."""
    status.tell(f"starting {plan.layout.world_size} ranks")
    display = Display(status, job.training.train_iters)
    try:
        outcome = run_with_restarts(plan, job, restarts, display, warm)
    except JobStopped as stop:
        outcome = Outcome(128 + stop.number, "", stopped_by=stop.number)
    display.end()
    return outcome
