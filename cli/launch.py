"""`planner launch`: plan for this machine, train, and compare the plan with what happened."""

from __future__ import annotations

import dataclasses
import sys
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import typer

from cli.notes import unbalanced_experts, whole_optimizer
from cli.restarts import run_with_restarts, usable_ranks
from cli.tables import console, table
from cli.trial import TrialOptions, best_of
from costmodels.catalogue.host import available_cores
from costmodels.errors import InputError
from costmodels.words import GIB, in_seconds
from planner.flags import arguments, flag, takes
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions, check_alone
from planner.plan import Plan
from runtime.faults.options import FaultOptions
from runtime.faults.replan import Before, previous_run, replanned, same_batch, same_unit
from runtime.job import search_here
from runtime.launch import Measured, measured, shell_line, torchrun_command
from runtime.options import DataOptions, OutputOptions, TrainingOptions
from runtime.preflight import check_folder, check_plan, check_timeout, check_training
from runtime.text import open_datasets

MOST_CPU_RANKS = 8
"""Ranks on a machine without GPUs, if it has as many cores and none are asked for."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """How the job is started."""

    plan: str | None = flag(None, "Plan file to run instead of planning.", metavar="FILE")
    dry_run: bool = flag(False, "Print the torchrun command and stop.")
    distributed_timeout_minutes: float = flag(10.0, "Minutes after which a stuck collective is an error.")
    max_restarts: int = flag(
        0, "Start the job again from its last checkpoint after so many failures, such as a killed rank."
    )

    def check(self, output: OutputOptions) -> None:
        """Raise `InputError` for values that make no sense."""
        check_timeout(self.distributed_timeout_minutes)
        if self.max_restarts < 0:
            raise InputError(f"--max-restarts {self.max_restarts}: must be 0 (never) or positive")
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
def launch(
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
) -> None:
    """Plan for this machine and train the winner on all its GPUs, or on its CPU."""
    training.check()
    output.check()
    options.check(output)
    trial.check(options.plan, options.dry_run)
    previous = previous_run(output)
    if options.plan is None:
        kept = same_batch(batch, previous), same_unit(parallel, training, previous)
        plans = _plans(model, cluster, *kept, trial.plans_to_try or 1)
    else:
        check_alone(model, batch, parallel, dataclasses.replace(cluster, world_size=None))
        plans = [_planned(options.plan, cluster, training, previous)]
    plan = plans[0]
    ranks = plan.layout.world_size
    check_plan(plan, ranks)
    check_training(plan, training)
    log_dir = Path(output.log_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-{Path(plan.model.name).name}")
    logged = dataclasses.replace(output, log_dir=str(log_dir))
    faults.check(logged.log_dir, options.distributed_timeout_minutes)
    common = [*arguments(training), *arguments(data), *arguments(faults), *_timeout(options)]
    settings = [*common, *arguments(logged)]
    if options.dry_run:
        # torchrun says how many ranks there are.
        joined = dataclasses.replace(cluster, world_size=None, local_world_size=None)
        chosen = [word for group in (model, joined, batch, parallel) for word in arguments(group)]
        words = ["--plan", options.plan] if options.plan else chosen
        print(shell_line(torchrun_command(ranks, [*words, *settings])))
        return
    for name, folder in (("--save", output.save), ("--tensorboard-dir", output.tensorboard_dir)):
        if folder is not None:
            check_folder(folder, name)
    # Last, so that a job which is refused leaves no folder of a run behind.
    _prepare_data(plan, training, data, output)
    if trial.plans_to_try is not None:
        plan = _tried(plans, trial, training, data, options)
    check_folder(log_dir, "--log-dir")
    plan_file = log_dir / "plan.json"
    plan.save(plan_file)
    print(f"{plan.model.name} on {ranks} x {plan.cluster.device.name}: {plan.layout.describe()}")
    print(_prediction(plan, training.train_iters))
    for note in (*unbalanced_experts(plan, training), *whole_optimizer(plan, parallel)):
        print(f"note: {note}")
    print(f"plan, metrics and output are in {log_dir}", flush=True)
    try:
        with _Display(training.train_iters) as display:
            outcome = run_with_restarts(
                ranks, ["--plan", str(plan_file), *common], logged, options.max_restarts, display
            )
    except KeyboardInterrupt:
        print(f"planner: stopped; all ranks have ended, their output is in {log_dir}", file=sys.stderr)
        raise typer.Exit(130) from None
    if outcome.exit_code:
        print(f"planner: error: {outcome.message}", file=sys.stderr)
        raise typer.Exit(outcome.exit_code)
    figures = measured(log_dir)
    if figures is not None:
        _print_comparison(plan, figures)


def _tried(
    plans: list[Plan],
    trial: TrialOptions,
    training: TrainingOptions,
    data: DataOptions,
    options: LaunchOptions,
) -> Plan:
    """The one of `plans` that is best on this machine."""
    try:
        return best_of(plans, trial.iterations, training, data, _timeout(options))
    except KeyboardInterrupt:
        print("planner: stopped; all ranks have ended, and the trials left nothing", file=sys.stderr)
        raise typer.Exit(130) from None


def _plans(
    model: ModelOptions, cluster: ClusterOptions, batch: BatchOptions, parallel: ParallelOptions, most: int
) -> list[Plan]:
    """The best plans for the devices of this machine."""
    gpus = 0
    if cluster.device != "cpu":
        from runtime.devices import detect_device, local_device_count  # PyTorch, which a CPU needs not yet.

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
    margin = cluster.memory_margin_gib
    result = search_here(
        model, batch, parallel, device, ranks, ranks, memory_margin_gib=margin, **cluster.network()
    )
    for note in model.notes():
        print(f"planner: assumed: {note}", file=sys.stderr)
    return result.plans(most)


def _planned(path: str, cluster: ClusterOptions, training: TrainingOptions, previous: Before | None) -> Plan:
    """The plan of the file; a job that goes on is planned anew where it has other ranks now."""
    plan = Plan.load(path)
    if previous is not None:
        ranks = cluster.world_size or usable_ranks(plan)
        if ranks != plan.layout.world_size:
            return replanned(plan, ranks, ranks, training)
    if cluster.world_size not in (None, plan.layout.world_size):
        raise InputError(
            f"--world-size {cluster.world_size}: the plan {path} is for world size {plan.layout.world_size}; "
            "leave it out or plan again"
        )
    if plan.cluster.device.kind == "cpu":
        return plan
    from runtime.devices import local_device_count

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


def _prediction(plan: Plan, train_iters: int) -> str:
    estimate = plan.estimate
    run = timedelta(seconds=round(estimate.step_time_s * train_iters))
    return (
        f"predicted: {in_seconds(estimate.step_time_s)} a step, {run} for {train_iters} iterations, "
        f"{estimate.peak_memory_bytes / GIB:.2f} of {plan.cluster.memory_bytes / GIB:.1f} GiB a rank"
    )


def _print_comparison(plan: Plan, figures: Measured) -> None:
    estimate, memory = plan.estimate, plan.estimate.peak_memory_bytes
    what = "peak memory (GiB)"
    if plan.cluster.device.kind != "cpu":
        # A GPU's allocator counts tensors, not the driver's context or communication buffers.
        memory = max(stage.total - stage.overhead for stage in estimate.memory)
        what = "peak of tensors (GiB)"
    rows = [
        _compared("step time (s)", estimate.step_time_s, figures.step_time_s),
        _compared(what, memory / GIB, figures.peak_memory_bytes / GIB),
    ]
    console().print(table(["", "predicted", "measured", "predicted / measured"], rows, left=("",)))


def _compared(name: str, predicted: float, seen: float) -> list[str]:
    return [name, f"{predicted:.4g}", f"{seen:.4g}", f"{predicted / seen:.2f}"]


class _Display:
    """A progress bar under the lines of the job; on a pipe the lines alone."""

    def __init__(self, train_iters: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console(),
            transient=True,
            disable=not console().is_terminal,
        )
        self.task = self.progress.add_task("", total=train_iters)

    def __enter__(self) -> _Display:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def line(self, text: str) -> None:
        """Show a line of the job."""
        if self.progress.disable:
            print(text, flush=True)
        else:
            self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def metrics(self, record: dict[str, Any]) -> None:
        """Move the bar to a logged step."""
        if "step_time_s" in record:
            text = f"loss {record['loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s"
            self.progress.update(self.task, completed=record["iteration"], description=text)
