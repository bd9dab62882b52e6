"""Train a plan: `torchrun -m runtime.pretrain`, with `--plan plan.json` or planning for itself."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import typer

import planner.flags
from costmodels.errors import InputError
from planner.flags import flag, takes
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions, check_alone
from planner.plan import Plan
from runtime import checkpoint
from runtime.data import Datasets
from runtime.devices import detect_device, local_device_count, torch_device
from runtime.launch import ERROR_FILE_VARIABLE
from runtime.metrics import Recorder, log_line, peak_memory_bytes, throughput, validation_line
from runtime.options import DataOptions, OutputOptions, TrainingOptions
from runtime.preflight import check_folder, check_job, check_model, check_timeout
from runtime.ranks import Ranks, end_with_agent, in_turns, is_lost_connection, on_first_rank, start
from runtime.text import open_datasets
from runtime.trainer import StepResult, Trainer

IS_FIRST = os.environ.get("RANK", "0") == "0"
"""Rank 0 speaks for all: a job refuses its input on every rank, but says so once."""


@dataclass(frozen=True)
class RunOptions:
    """What to run, and how the ranks find each other."""

    plan: str | None = flag(None, "Plan file of `planner suggest --save`; without it rank 0 plans.")
    distributed_timeout_minutes: float = flag(10.0, "Minutes after which a stuck collective is an error.")


@dataclass(frozen=True)
class Job:
    """The flags of a run."""

    model: ModelOptions
    cluster: ClusterOptions
    batch: BatchOptions
    parallel: ParallelOptions
    training: TrainingOptions
    data: DataOptions
    output: OutputOptions
    run: RunOptions


def plan_for(job: Job, ranks: Ranks) -> Plan:
    """The plan of the file that the flags name, or the best one for the ranks that exist."""
    for name in ("world_size", "local_world_size"):
        given, started = getattr(job.cluster, name), getattr(ranks, name)
        if given not in (None, started):
            raise InputError(
                f"--{name.replace('_', '-')} {given}: torchrun started {started} ranks; leave the flag out"
            )
    if job.run.plan is not None:
        check_alone(job.model, job.batch, job.parallel)
        return Plan.load(job.run.plan)
    from planner.search import suggest

    spec = job.model.spec()
    check_model(spec)
    device = job.cluster.device or detect_device(ranks.local_world_size)
    return suggest(
        spec,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        device=device,
        global_batch_size=job.batch.global_batch_size,
        max_global_batch_size=job.batch.max_global_batch_size,
        engine=job.parallel.engine,
        pin=job.parallel.pins(spec),
    )


def preflight(plan: Plan, job: Job, world_size: int) -> None:
    """Refuse, with one line, what would fail later."""
    job.training.check()
    job.output.check()
    check_job(plan.model, plan.layout, world_size)
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
    finally:
        dist.destroy_process_group()


def _run(job: Job, ranks: Ranks, device: torch.device) -> None:
    plan = Plan.model_validate_json(on_first_rank(lambda: _prepare(job, ranks)))
    spec, layout = plan.model, plan.layout
    datasets = in_turns(ranks, lambda: _datasets(job, plan))
    trainer = Trainer(spec, layout, job.training, device)
    consumed = 0
    if job.output.load is not None:
        iteration = on_first_rank(lambda: checkpoint.latest_iteration(str(job.output.load)))
        if iteration is not None:
            consumed = checkpoint.load(job.output.load, trainer, spec, iteration)["consumed_samples"]
    if ranks.rank == 0:
        _announce(plan, trainer.iteration, job.output.load)
    _Loop(job, plan, trainer, datasets, consumed).run()


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
        job.training.train_iters * batch,
        job.output.eval_iters * batch,
    )


def _announce(plan: Plan, iteration: int, folder: str | None) -> None:
    print(
        f"training {plan.model.name} ({plan.model.parameters / 1e6:.1f} M parameters) on "
        f"{plan.layout.world_size} x {plan.cluster.device.name} as {plan.layout.describe()}",
        flush=True,
    )
    if iteration:
        print(f"resumed from {folder} at iteration {iteration}", flush=True)
    elif folder is not None:
        print(f"no checkpoint in {folder}: starting at iteration 0", flush=True)


class _Loop:
    """The iterations of a run, with their evaluations, log lines and checkpoints."""

    def __init__(
        self, job: Job, plan: Plan, trainer: Trainer, datasets: Datasets, consumed_samples: int
    ) -> None:
        self.job, self.plan, self.trainer, self.datasets = job, plan, trainer, datasets
        self.consumed_samples = consumed_samples
        self.batch = plan.layout.global_batch_size
        self.is_first = dist.get_rank() == 0
        self.recorder = (
            Recorder(job.output.log_dir, job.output.tensorboard_dir, trainer.iteration)
            if self.is_first
            else None
        )
        self.results: list[StepResult] = []
        self.evaluated_at = -1

    def run(self) -> None:
        output, trainer = self.job.output, self.trainer
        last = self.job.training.train_iters
        if trainer.iteration == 0:
            self.evaluate()
        # Collector pauses on one rank stall all others; cycles are collected when the run logs, among what
        # the steps have made only: going through all that is imported takes a quarter of a second.
        gc.collect()
        gc.freeze()
        gc.disable()
        clock = _Clock(trainer.grid.device)
        while trainer.iteration < last:
            self.step()
            iteration = trainer.iteration
            stop = output.exit_interval is not None and iteration % output.exit_interval == 0
            if iteration % output.log_interval == 0 or iteration == last or stop:
                self.log(clock.elapsed_s() / len(self.results))
                clock.restart()
                gc.collect()
            with clock.paused():
                if iteration % output.eval_interval == 0 or iteration == last:
                    self.evaluate()
                if output.save is not None and (
                    iteration == last
                    or stop
                    or (output.save_interval is not None and iteration % output.save_interval == 0)
                ):
                    self.save()
            if stop:
                break
        if self.recorder is not None:
            self.recorder.close()

    def step(self) -> None:
        """Train on the next global batch."""
        assert self.datasets.train is not None
        samples = self.datasets.train.batch(self.positions(self.consumed_samples))
        self.results.append(self.trainer.train_step(samples))
        self.consumed_samples += self.batch

    def positions(self, first: int) -> list[int]:
        """Samples that this rank takes of the global batch which starts at sample `first`."""
        return [first + int(row) for row in self.trainer.rows]

    def log(self, step_time_s: float) -> None:
        """Report the iterations since the last report."""
        peak = torch.tensor(float(peak_memory_bytes(self.trainer.grid.device)), dtype=torch.float64)
        peak = peak.to(self.trainer.grid.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        losses = torch.stack([result.loss for result in self.results])
        metrics: dict[str, Any] = {
            "iteration": self.trainer.iteration,
            "loss": float(losses.mean()),
            "learning_rate": self.results[-1].learning_rate,
            "grad_norm": float(self.results[-1].grad_norm),
            "step_time_s": step_time_s,
            **throughput(self.plan.model, self.plan.layout, self.plan.cluster, step_time_s),
            "peak_memory_bytes": int(peak),
            "nan_iterations": int((~losses.isfinite()).sum()),
        }
        self.results = []
        if self.recorder is not None:
            self.recorder.step(metrics, self.batch)
            print(log_line(metrics, self.job.training.train_iters, self.batch, datetime.now()), flush=True)

    def evaluate(self) -> None:
        """Mean loss over the validation samples, the same ones every time."""
        iteration, batches = self.trainer.iteration, self.job.output.eval_iters
        if self.datasets.valid is None or self.evaluated_at == iteration:
            return
        losses = [
            self.trainer.evaluate(self.datasets.valid.batch(self.positions(number * self.batch)))
            for number in range(batches)
        ]
        loss = float(np.mean(losses))
        self.evaluated_at = iteration
        if self.recorder is not None:
            self.recorder.validation(iteration, loss, self.batch)
            print(validation_line(iteration, loss), flush=True)

    def save(self) -> None:
        """Write a checkpoint."""
        assert self.job.output.save is not None
        run = {
            "consumed_samples": self.consumed_samples,
            "seed": self.job.training.seed,
            "layout": self.plan.layout.model_dump(mode="json"),
        }
        folder = checkpoint.save(self.job.output.save, self.trainer, self.plan.model, run)
        if self.is_first:
            print(f"saved checkpoint {folder}", flush=True)


class _Clock:
    """Seconds of training, device work included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        self._synchronize()
        self.started = time.perf_counter()

    def elapsed_s(self) -> float:
        self._synchronize()
        return time.perf_counter() - self.started

    @contextmanager
    def paused(self) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.started += time.perf_counter() - since

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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


if __name__ == "__main__":
    planner.flags.run(app, "runtime.pretrain", quiet=not IS_FIRST)
