"""`planner launch`: plan for this machine, train, and compare the plan with what happened."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import typer

from cli.ending import Ending, peak_bytes, peak_range, step_range
from cli.notes import unbalanced_experts, whole_optimizer
from cli.pasted import RESTARTS
from cli.progress import Display
from cli.restarts import run_with_restarts, usable_ranks
from cli.status import Status
from cli.trial import TrialOptions, best_of
from costmodels.catalogue.host import available_cores
from costmodels.errors import InputError
from costmodels.words import GIB, in_seconds
from planner.asked import idle_links
from planner.flags import arguments, flag, takes
from planner.numbers import check_bounds
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions, check_alone
from planner.plan import Plan
from planner.rule import Rule
from planner.twins import listed
from runtime.checkpoint.owner import owned
from runtime.faults.options import FaultOptions
from runtime.job.job import search_here
from runtime.job.replan import Before, previous_run, replanned, same_batch, same_unit
from runtime.job.text import open_datasets
from runtime.launch.torchrun import Outcome, Stopped, shell_line, torchrun_command
from runtime.launch.warm_ranks import FORKS, WarmRanks
from runtime.logs.console import say
from runtime.processes.scheduler import check_one_task
from runtime.settings.job_rules import job_rules, reachable
from runtime.settings.options import DataOptions, OutputOptions, TrainingOptions
from runtime.settings.preflight import TIMEOUT, check_folder, check_host, check_plan, check_training

MOST_CPU_RANKS = 8
"""Ranks on a machine without GPUs, if it has as many cores and none are asked for."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """How the job is started."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "Job"}

    plan: str | None = flag(None, "Plan file to run instead of planning.", metavar="FILE")
    dry_run: bool = flag(False, "Print the torchrun command and stop.")
    distributed_timeout_minutes: float = flag(
        10.0, "Minutes after which a stuck collective is an error.", within=TIMEOUT
    )
    max_restarts: int = flag(
        0,
        "Start the job again from its last checkpoint after so many failures, such as a killed rank.",
        within=RESTARTS,
    )

    def check(self, output: OutputOptions) -> None:
        """Raise `InputError` for values that make no sense."""
        check_bounds(self)
        if self.max_restarts and output.save is None:
            raise InputError("--max-restarts needs --save FOLDER, whose last checkpoint is gone on from")


@takes(
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
def launch(**groups: Any) -> None:
    """Plan for this machine and train the winner on all its GPUs, or on its CPU."""
    with WarmRanks() as warm:
        _launch(**groups, warm=warm)


def _launch(
    model: ModelOptions,
    cluster: ClusterOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    training: TrainingOptions,
    data: DataOptions,
    output: OutputOptions,
    faults: FaultOptions,
    options: LaunchOptions,
    trial: TrialOptions,
    warm: WarmRanks,
) -> None:
    training.check()
    output.check()
    options.check(output)
    trial.check(options.plan, options.dry_run)
    if not options.dry_run:
        check_one_task(os.environ)
        if cluster.device == "cpu" and cluster.world_size is not None:
            check_host(cluster.world_size, f"--world-size {cluster.world_size}")
    with Status() as status:
        if not options.dry_run:
            status.tell("planning")
        previous = previous_run(output)
        if options.plan is None:
            kept = reachable(same_batch(batch, previous), training), same_unit(parallel, training, previous)
            rules = job_rules(training, data)
            plans = _plans(
                model, cluster, *kept, rules, trial.plans_to_try or 1, None if options.dry_run else warm
            )
        else:
            check_alone(model, batch, parallel, dataclasses.replace(cluster, world_size=None))
            plans = [_planned(options.plan, cluster, training, data, previous)]
        plan = plans[0]
        ranks = plan.layout.world_size
        forked = warm if FORKS and plan.cluster.device.kind == "cpu" else None
        if forked is not None and not options.dry_run:
            forked.prepare(ranks)
        check_plan(plan, ranks)
        check_training(plan, training, data)
        if output.load is not None:
            from runtime.job.pretrained import check_loaded

            check_loaded(output, plan.model)
        log_dir = Path(output.log_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-{Path(plan.model.name).name}")
        logged = dataclasses.replace(output, log_dir=str(log_dir))
        faults.check(logged.log_dir, options.distributed_timeout_minutes)
        rest = [*arguments(data), *arguments(faults), *_timeout(options)]
        common = [*arguments(training), *rest]
        if options.dry_run:
            # torchrun says how many ranks there are.
            joined = dataclasses.replace(cluster, world_size=None, local_world_size=None)
            chosen = [word for group in (model, joined, batch, parallel) for word in arguments(group)]
            words = ["--plan", options.plan] if options.plan else chosen
            print(shell_line(torchrun_command(ranks, [*words, *common, *arguments(logged)])))
            return
        if plan.cluster.device.kind == "cpu":
            asked = f"the plan {options.plan}" if options.plan else f"--world-size {ranks}"
            check_host(ranks, asked, plan.estimate.peak_memory_bytes)
        for name, folder in (("--save", output.save), ("--tensorboard-dir", output.tensorboard_dir)):
            if folder is not None:
                check_folder(folder, name)
        if output.save is not None:
            with owned(Path(output.save), f"--save {output.save}"):
                pass  # The first rank takes it over; who cannot have it need not start ranks.
        status.tell("preparing the data")
        # Last, so that a job which is refused leaves no folder of a run behind.
        _prepare_data(plan, training, data, output)
        if trial.plans_to_try is not None:
            status.clear()
            plan = _tried(plans, trial, training, data, options, forked)
        if output.log_dir is None:
            log_dir = _run_folder(log_dir)
            logged = dataclasses.replace(output, log_dir=str(log_dir))
        check_folder(log_dir, "--log-dir")
        plan_file = log_dir / "plan.json"
        plan.save(plan_file)
        start = 0 if previous is None else previous.iteration
        status.line(f"{plan.model.name} on {ranks} x {plan.cluster.device.name}: {plan.layout.describe()}")
        status.line(_prediction(plan, max(0, training.train_iters - start)))
        for note in (*unbalanced_experts(plan, training), *whole_optimizer(plan, parallel)):
            status.line(f"note: {note}")
        status.line(f"plan, metrics and output are in {log_dir}")
        status.tell(f"starting {ranks} ranks")
        if options.max_restarts:
            rest += ["--max-restarts", str(options.max_restarts)]
        display = Display(status, training.train_iters)
        try:
            outcome = run_with_restarts(
                ranks, ["--plan", str(plan_file), *common], logged, options.max_restarts, display, forked
            )
        except Stopped as stop:
            outcome = Outcome(128 + stop.number, "", stopped_by=stop.number)
        display.end()
    _say_end(outcome, Ending(plan, log_dir, training, output, rest, start))
    if outcome.stopped_by is signal.SIGINT or outcome.exit_code:
        raise typer.Exit(outcome.exit_code or 128 + signal.SIGINT)


def _run_folder(first: Path) -> Path:
    """A new folder of this job's own: `first`, or with a number where another job has just made that."""
    check_folder(first.parent, "--log-dir")
    path = first
    for number in itertools.count(2):
        try:
            path.mkdir()
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{number}")
    return path


def _say_end(outcome: Outcome, ending: Ending) -> None:
    """How a job ended, and how to go on; nothing that goes wrong here changes its exit code."""
    if outcome.message:
        say(f"planner: error: {outcome.message}", sys.stderr)
    elif outcome.stopped_by is not None:
        how = f"{outcome.stopped_by.name}: all ranks have ended, their output is in {ending.log_dir}"
        say(f"planner: stopped by {how}", sys.stderr)
    try:
        for line in ending.lines():
            say(line)
    except Exception as error:
        say(f"planner: warning: cannot say how it ran ({type(error).__name__}: {error})", sys.stderr)


def _tried(
    plans: list[Plan],
    trial: TrialOptions,
    training: TrainingOptions,
    data: DataOptions,
    options: LaunchOptions,
    warm: WarmRanks | None,
) -> Plan:
    """The one of `plans` that is best on this machine."""
    try:
        return best_of(plans, trial.iterations, training, data, _timeout(options), warm)
    except Stopped as stop:
        name = stop.number.name
        say(f"planner: stopped by {name}; all ranks have ended, and the trials left nothing", sys.stderr)
        raise typer.Exit(128 + stop.number) from None


def _plans(
    model: ModelOptions,
    cluster: ClusterOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    rules: Sequence[Rule],
    most: int,
    warm: WarmRanks | None,
) -> list[Plan]:
    """The best plans that the job can run on this machine, whose CPU `warm` readies meanwhile."""
    gpus = 0
    if cluster.device != "cpu":
        from runtime.job.devices import (  # PyTorch, which a CPU needs not yet.
            detect_device,
            local_device_count,
        )

        gpus = local_device_count()
    if cluster.device not in (None, "cpu") and not gpus:
        raise InputError(f"--device {cluster.device}: this machine has no GPUs; leave it out or give cpu")
    if cluster.world_size is not None and cluster.world_size < 1:
        raise InputError(f"--world-size {cluster.world_size}: must be at least 1")
    ranks = cluster.world_size or gpus or min(MOST_CPU_RANKS, available_cores())
    if cluster.local_world_size not in (None, ranks):
        raise InputError(
            f"--local-world-size {cluster.local_world_size}: all {ranks} ranks start on this machine; "
            "leave it out"
        )
    if gpus and ranks > gpus:
        raise InputError(
            f"--world-size {ranks}: this machine has {gpus} GPUs; give at most that, or start torchrun on "
            "every node with -m runtime.pretrain"
        )
    device = cluster.device or detect_device(ranks)
    if warm is not None and FORKS and not gpus:
        warm.prepare(ranks)
    margin = cluster.memory_margin_gib
    further: dict[str, Any] = {"memory_margin_gib": margin, "rules": rules, **cluster.network()}
    result = search_here(model, batch, parallel, device, ranks, ranks, **further)
    idle = idle_links(cluster, result.problem.cluster)
    for note in (*model.notes(), *parallel.notes(), *idle):
        print(f"planner: assumed: {note}", file=sys.stderr)
    _, rows = listed(result, most)
    return [row.plan for row in rows]


def _planned(
    path: str,
    cluster: ClusterOptions,
    training: TrainingOptions,
    data: DataOptions,
    previous: Before | None,
) -> Plan:
    """The plan of the file; a job that goes on is planned anew where it has other ranks now."""
    plan = Plan.load(path)
    if previous is not None:
        ranks = cluster.world_size or usable_ranks(plan)
        if ranks != plan.layout.world_size:
            return replanned(plan, ranks, ranks, training, data)
    if cluster.world_size not in (None, plan.layout.world_size):
        raise InputError(
            f"--world-size {cluster.world_size}: the plan {path} is for world size {plan.layout.world_size}; "
            "leave it out or plan again"
        )
    if plan.cluster.device.kind == "cpu":
        return plan
    from runtime.job.devices import local_device_count

    if plan.layout.world_size > local_device_count():
        raise InputError(
            f"the plan {path} is for {plan.layout.world_size} x {plan.cluster.device.name}, but this machine "
            f"has {local_device_count()} GPUs; plan for this machine, or start torchrun on every node"
        )
    return plan


def _timeout(options: LaunchOptions) -> list[str]:
    minutes = options.distributed_timeout_minutes
    if minutes == LaunchOptions().distributed_timeout_minutes:
        return []
    return ["--distributed-timeout-minutes", str(minutes)]


def _prepare_data(plan: Plan, training: TrainingOptions, data: DataOptions, output: OutputOptions) -> None:
    """Open the data once before ranks start: it is checked, and the default corpus prepared."""
    samples = training.batches(plan.layout).total(training.train_iters)
    evaluated = output.eval_iters * plan.layout.global_batch_size
    open_datasets(data, plan.model, training.seed, samples, evaluated)


def _prediction(plan: Plan, iterations: int) -> str:
    """What the plan promises of a run of so many iterations, in two lines."""
    estimate = plan.estimate
    run = timedelta(seconds=round(estimate.step_time_s * iterations))
    what, peak = peak_bytes(plan)
    return (
        f"predicted: {in_seconds(estimate.step_time_s)} a step ({step_range(plan)}), {run} for {iterations} "
        f"iterations\npredicted: {what} {peak / GIB:.3g} GiB ({peak_range(plan)}); a rank takes "
        f"{estimate.peak_memory_bytes / GIB:.2f} of {plan.cluster.memory_bytes / GIB:.1f} GiB"
    )
