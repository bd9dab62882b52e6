"""The iterations of a run: training, evaluations, log lines and checkpoints."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from planner.plan import Plan
from runtime import checkpoint
from runtime.data import Datasets
from runtime.job import Job, sample_order
from runtime.metrics import Recorder, expert_metrics, log_line, peak_memory_bytes, throughput, validation_line
from runtime.trainer import StepResult, Trainer


class Loop:
    """The iterations of a run, with their evaluations, log lines and checkpoints."""

    def __init__(
        self, job: Job, plan: Plan, trainer: Trainer, datasets: Datasets, consumed_samples: int
    ) -> None:
        self.job, self.plan, self.trainer, self.datasets = job, plan, trainer, datasets
        self.consumed_samples = consumed_samples
        self.batches = job.training.batches(plan.layout)
        self.batch = self.batches.at(consumed_samples)
        self.logged_samples = consumed_samples
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
        clock = Clock(trainer.grid.device)
        while trainer.iteration < last:
            self.step()
            iteration = trainer.iteration
            stop = output.exit_interval is not None and iteration % output.exit_interval == 0
            if iteration % output.log_interval == 0 or iteration == last or stop:
                self.log(clock.elapsed_s() / len(self.results))
                clock.restart()
                gc.collect()
            evaluates = iteration % output.eval_interval == 0 or iteration == last
            saves = output.save is not None and (
                iteration == last
                or stop
                or (output.save_interval is not None and iteration % output.save_interval == 0)
            )
            # A pause waits for the device, so a step without either must not make one.
            if evaluates or saves:
                with clock.paused():
                    if evaluates:
                        self.evaluate()
                    if saves:
                        self.save()
            if stop:
                break
        if self.recorder is not None:
            self.recorder.close()

    def step(self) -> None:
        """Train on the next global batch."""
        assert self.datasets.train is not None
        self.batch = self.batches.at(self.consumed_samples)
        rows = self.trainer.rows_of(self.batch)
        samples = self.datasets.train.batch(self.positions(self.consumed_samples, rows))
        self.results.append(self.trainer.train_step(samples))
        self.consumed_samples += self.batch

    def positions(self, first: int, rows: Iterable[int]) -> list[int]:
        """Samples that this rank takes of the global batch which starts at sample `first`."""
        return [first + int(row) for row in rows]

    def log(self, step_time_s: float) -> None:
        """Report the iterations since the last report."""
        peak = torch.tensor(float(peak_memory_bytes(self.trainer.grid.device)), dtype=torch.float64)
        peak = peak.to(self.trainer.grid.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        losses = torch.stack([result.loss for result in self.results])
        kept = [number for number, result in enumerate(self.results) if not result.skipped]
        sequences = (self.consumed_samples - self.logged_samples) / len(self.results)
        metrics: dict[str, Any] = {
            "iteration": self.trainer.iteration,
            # As in Megatron-LM, that of the steps that changed the weights.
            "loss": float((losses[kept] if kept else losses).mean()),
            "learning_rate": self.results[-1].learning_rate,
            "grad_norm": float(self.results[-1].grad_norm),
            "step_time_s": step_time_s,
            **throughput(self.plan.model, self.plan.layout, self.plan.cluster, sequences / step_time_s),
            "peak_memory_bytes": int(peak),
            "nan_iterations": int((~losses.isfinite()).sum()),
            "loss_scale": self.results[-1].loss_scale,
            "skipped_iterations": len(self.results) - len(kept),
        }
        if self.trainer.balance is not None:
            metrics |= expert_metrics(self.trainer.balance.report())
        self.results, self.logged_samples = [], self.consumed_samples
        if self.recorder is not None:
            self.recorder.step(metrics, self.consumed_samples, self.batch)
            last = self.job.training.train_iters
            print(log_line(metrics, last, self.consumed_samples, self.batch, datetime.now()), flush=True)

    def evaluate(self) -> None:
        """Mean loss over the validation samples, the same ones every time."""
        iteration, batches = self.trainer.iteration, self.job.output.eval_iters
        if self.datasets.valid is None or self.evaluated_at == iteration:
            return
        batch, rows = self.plan.layout.global_batch_size, self.trainer.rows
        losses = [
            self.trainer.evaluate(self.datasets.valid.batch(self.positions(number * batch, rows)))
            for number in range(batches)
        ]
        loss = float(np.mean(losses))
        self.evaluated_at = iteration
        if self.recorder is not None:
            self.recorder.validation(iteration, loss, self.consumed_samples)
            print(validation_line(iteration, loss), flush=True)

    def save(self) -> None:
        """Write a checkpoint."""
        assert self.job.output.save is not None
        run = {"consumed_samples": self.consumed_samples, **sample_order(self.job, self.datasets)}
        folder = checkpoint.save(self.job.output.save, self.trainer, self.plan.model, run)
        if self.is_first:
            print(f"saved checkpoint {folder}", flush=True)


class Clock:
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
        """Leave out what happens meanwhile; work that was queued before still counts."""
        self._synchronize()
        since = time.perf_counter()
        yield
        self._synchronize()
        self.started += time.perf_counter() - since

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
