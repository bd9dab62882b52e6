"""Train a plan: `torchrun -m runtime.pretrain`, with `--plan plan.json` or planning for itself."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import typer

import planner.flags
from costmodels.errors import InputError
from planner.flags import takes
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions, check_alone
from planner.plan import Plan
from runtime import checkpoint
from runtime.data import Datasets
from runtime.devices import detect_device, local_device_count, torch_device
from runtime.float8 import check_float8
from runtime.job import Job, RunOptions, plan_here, sample_order
from runtime.launch import ERROR_FILE_VARIABLE
from runtime.loop import Loop
from runtime.optimizers.adam8bit import check_adam8bit
from runtime.options import DataOptions, OutputOptions, TrainingOptions
from runtime.preflight import check_folder, check_plan, check_timeout, check_training
from runtime.ranks import (
    Ranks,
    end_with_agent,
    finish,
    in_turns,
    is_lost_connection,
    on_first_rank,
    start,
    together,
)
from runtime.text import open_datasets
from runtime.trainer import Trainer

IS_FIRST = os.environ.get("RANK", "0") == "0"
"""Rank 0 speaks for all: a job refuses its input on every rank, but says so once."""


def plan_for(job: Job, ranks: Ranks) -> Plan:
    """The plan of the file that the flags name, or the best one for the ranks that exist."""
    for name in ("world_size", "local_world_size"):
        given, started = getattr(job.cluster, name), getattr(ranks, name)
        if given not in (None, started):
            raise InputError(
                f"--{name.replace('_', '-')} {given}: torchrun started {started} ranks; leave the flag out"
            )
    if job.run.plan is not None:
        joined = dataclasses.replace(job.cluster, world_size=None, local_world_size=None, device=None)
        check_alone(job.model, job.batch, job.parallel, joined)
        return Plan.load(job.run.plan)
    device = job.cluster.device or detect_device(ranks.local_world_size)
    sizes = ranks.world_size, ranks.local_world_size
    margin = job.cluster.memory_margin_gib
    return plan_here(
        job.model, job.batch, job.parallel, device, *sizes, memory_margin_gib=margin, **job.cluster.network()
    )


def preflight(plan: Plan, job: Job, world_size: int) -> None:
    """Refuse, with one line, what would fail later."""
    job.training.check()
    job.output.check()
    check_plan(plan, world_size)
    check_training(plan, job.training)
    for name in ("save", "log_dir", "tensorboard_dir"):
        folder = getattr(job.output, name)
        if folder is not None:
            check_folder(folder, f"--{name.replace('_', '-')}")


def train(job: Job) -> None:
    """Run the job on this rank."""
    end_with_agent()
    ranks = Ranks.from_environment()
    on_cpu = job.cluster.device == "cpu" or (job.run.plan is not None and _is_cpu_plan(job.run.plan))
    device = torch_device(on_cpu or not local_device_count(), ranks)
    check_timeout(job.run.distributed_timeout_minutes)
    start(ranks, device, job.run.distributed_timeout_minutes)
    try:
        _run(job, ranks, device)
    except InputError:
        dist.destroy_process_group()
        raise
    finish(device)


def _run(job: Job, ranks: Ranks, device: torch.device) -> None:
    plan = Plan.model_validate_json(on_first_rank(lambda: _prepare(job, ranks)))
    spec, layout = plan.model, plan.layout
    if layout.precision == "fp8":
        together(lambda: check_float8(device))
    if layout.optimizer == "adam8bit":
        together(check_adam8bit)
    datasets = in_turns(ranks, lambda: _datasets(job, plan))
    trainer = Trainer(spec, layout, job.training, device)
    consumed = 0
    if job.output.load is not None:
        iteration = on_first_rank(lambda: checkpoint.latest_iteration(str(job.output.load)))
        if iteration is not None:
            order = sample_order(job, datasets)
            consumed = checkpoint.load(job.output.load, trainer, spec, iteration, order)["consumed_samples"]
    if ranks.rank == 0:
        _announce(plan, trainer.iteration, job)
    Loop(job, plan, trainer, datasets, consumed).run()


def _is_cpu_plan(path: str) -> bool:
    return Plan.load(path).cluster.device.kind == "cpu"


def _prepare(job: Job, ranks: Ranks) -> str:
    plan = plan_for(job, ranks)
    preflight(plan, job, ranks.world_size)
    return plan.model_dump_json()


def _datasets(job: Job, plan: Plan) -> Datasets:
    batch = plan.layout.global_batch_size
    return open_datasets(
        job.data,
        plan.model,
        job.training.seed,
        job.training.batches(plan.layout).total(job.training.train_iters),
        job.output.eval_iters * batch,
    )


def _announce(plan: Plan, iteration: int, job: Job) -> None:
    print(
        f"training {plan.model.name} ({plan.model.parameters / 1e6:.1f} M parameters) on "
        f"{plan.layout.world_size} x {plan.cluster.device.name} as {plan.layout.describe()}",
        flush=True,
    )
    folder, last = job.output.load, job.training.train_iters
    if iteration >= last:
        print(f"nothing to do: {folder} is at iteration {iteration} of --train-iters {last}", flush=True)
    elif iteration:
        print(f"resumed from {folder} at iteration {iteration}", flush=True)
    elif folder is not None:
        print(f"no checkpoint in {folder}: starting at iteration 0", flush=True)


app = typer.Typer(add_completion=False)


@app.command()
@takes(
    model=ModelOptions,
    cluster=ClusterOptions,
    batch=BatchOptions,
    parallel=ParallelOptions,
    training=TrainingOptions,
    data=DataOptions,
    output=OutputOptions,
    run=RunOptions,
)
def pretrain(**groups: Any) -> None:
    """Train a GPT-like model on the ranks that torchrun started."""
    try:
        train(Job(**groups))
    except InputError as error:
        target = os.environ.get(ERROR_FILE_VARIABLE)
        if target and IS_FIRST:
            report = {"message": planner.flags.one_line(error), "exit_code": error.exit_code}
            Path(target).write_text(json.dumps(report))
        raise
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        # torchrun blames the first rank that it sees ended: let that be the one that was lost.
        time.sleep(1.0)
        rank = os.environ.get("RANK", "0")
        print(f"runtime.pretrain: rank {rank} lost the connection to another rank", file=sys.stderr)
        raise typer.Exit(1) from None


def _leave() -> NoReturn:
    """End the process at once after success.

    Threads of the communication library can outlive the finalisation of the interpreter, and then abort a
    job that has done all its work.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        planner.flags.run(app, "runtime.pretrain", quiet=not IS_FIRST)
    except SystemExit as stop:
        if stop.code:
            raise
        _leave()
