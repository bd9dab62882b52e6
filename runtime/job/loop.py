"""The iterations of a run: training, evaluations, log lines and checkpoints."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from costmodels.errors import InputError
from planner.plan import Plan
from runtime.data import Datasets, Samples
from runtime.faults import heartbeat
from runtime.faults.exit_signals import INTERRUPTED, Request, Requests
from runtime.faults.heartbeat import set_operation
from runtime.faults.watchdog import fail_alone, running_watchdog
from runtime.job.comparison import comparison
from runtime.job.continuation import run_state
from runtime.job.history_line import remember
from runtime.job.job import Job, first_train_samples, sample_order
from runtime.job.log_lines import mindformers_lines, progress_line
from runtime.job.measurement import PROFILED, of_records
from runtime.job.metrics import (
    Recorder,
    evaluation_line,
    expert_metrics,
    largest_of_ranks,
    log_line,
    loss_of_updates,
    peak_memory_bytes,
    throughput,
)
from runtime.job.slow_ranks import SlowRanks
from runtime.job.tracking import run_trackers
from runtime.logs.console import note, progress, say
from runtime.logs.sample_log import SampleLog, drop_samples_after
from runtime.parallel.accelerator import device_module, is_accelerator
from runtime.parallel.ranks import wait_for_ranks
from runtime.processes.start_variables import SUMMARY_VARIABLE
from runtime.profiling.window import ProfileWindow, first_profiled
from runtime.train.trainer import StepResult, Trainer

if TYPE_CHECKING:
    from runtime.checkpoint import Saver


class Loop:
    """The iterations of a run, with their evaluations, log lines and checkpoints."""

    def __init__(
        self, job: Job, plan: Plan, trainer: Trainer, datasets: Datasets, consumed_samples: int
    ) -> None:
        self.job, self.plan, self.trainer = job, plan, trainer
        self.datasets = datasets.with_train_order(first_train_samples(job, trainer.iteration))
        trainer.use_boundaries(datasets.boundaries)
        self.consumed_samples = consumed_samples
        self.batches = job.training.batches(plan.layout)
        self.batch = self.batches.at(consumed_samples)
        self.logged_samples = consumed_samples
        self.is_first = dist.get_rank() == 0
        self.recorder = (
            Recorder(
                *(job.output.log_dir, job.output.tensorboard_dir, trainer.iteration),
                trackers=run_trackers(job, plan),
            )
            if self.is_first
            else None
        )
        self.stopped_by = Request.NOTHING
        self.figures: list[tuple[float, int]] = []
        """Seconds of a step and peak bytes, of each log line."""
        self.results: list[StepResult] = []
        self.window = self._window()
        self.profiled_s: list[float] = []
        """Seconds of the steps since the last log line that were profiled, which takes time of its own."""
        self.profiler_bytes = 0
        """Bytes by which the events of profiled steps have raised the peak of a process."""
        self.evaluated_at = -1
        self.slow_ranks = SlowRanks(running_watchdog(), trainer, job.faults.straggler_factor)
        self.samples = self._sample_log()
        self.saver = self._saver()
        self.requests = Requests(
            job.output.exit_duration_in_mins,
            self.saver is not None,
            timedelta(minutes=job.run.distributed_timeout_minutes),
        )

    def run(self) -> int:
        """Train to the end, or until a request to stop; returns the exit code."""
        with self.requests.signal_handlers():
            try:
                why = self._train()
                if self.saver is not None:
                    set_operation("saving a checkpoint")
                    self.saver.close()
            except InputError:
                if self.saver is not None:
                    self.saver.abandon()
                raise
        if self.recorder is not None:
            self.recorder.close()
        if why and self.is_first:
            folder, last = self.job.output.save, self.job.training.train_iters
            how = "nothing was saved" if folder is None else f"go on with --load {folder}"
            say(f"stopped after iteration {self.trainer.iteration} of {last}: {why}; {how}")
        figures = of_records(self.figures, self.window.parts)
        if self.is_first and figures is not None:
            remember(self.job, self.plan, figures, len(self.figures))
            for line in () if os.environ.get(SUMMARY_VARIABLE) else comparison(self.plan, figures):
                say(line)
        return INTERRUPTED if self.stopped_by is Request.INTERRUPT else 0

    def _train(self) -> str:
        """Train to the last iteration, or until a request to stop; returns the reason of a stop, or an empty
        text."""
        output, trainer = self.job.output, self.trainer
        last = self.job.training.train_iters
        if trainer.iteration == 0:
            if self.is_first and self.datasets.valid is not None:
                progress("the first evaluation")
            self.evaluate()
        if self.is_first and trainer.iteration < last:
            compiles = self.job.training.compiles(self.plan.layout, trainer.grid.device.type == "cuda")
            progress("the first step, which compiles the layers" if compiles else "the first step")
        # Collector pauses on one rank stall all others; cycles are collected when the run logs, among what
        # the steps have made only: going through all that is imported takes a quarter of a second.
        gc.collect()
        gc.freeze()
        gc.disable()
        clock = Clock(trainer.grid.device)
        while trainer.iteration < last:
            self._step(clock)
            iteration = trainer.iteration
            request = self.requests.after_step()
            stop = request.stops or (
                output.exit_interval is not None and iteration % output.exit_interval == 0
            )
            if iteration % output.log_interval == 0 or iteration == last or stop:
                self.log(clock.elapsed_s())
                clock.restart()
                gc.collect()
            evaluates = iteration % output.eval_interval == 0 or iteration == last
            saves = self.saver is not None and (
                iteration == last
                or stop
                or request is Request.SAVE
                or (output.save_interval is not None and iteration % output.save_interval == 0)
            )
            # A pause waits for the device, so a step without either must not make one.
            if evaluates or saves:
                with clock.pause():
                    if evaluates:
                        self.evaluate()
                    if saves:
                        self.save()
            if stop and iteration < last:
                if request.stops:
                    self.stopped_by = request
                    return self.requests.reason(request)
                return f"--exit-interval {output.exit_interval}"
        if trainer.iteration == last:
            self.test()
        return ""

    def _window(self) -> ProfileWindow:
        """The steps to profile; none where profiling is off, or where steps differ."""
        training, device = self.job.training, self.trainer.grid.device
        begins = first_profiled(self.trainer.iteration, training.train_iters)
        wanted = not self.job.output.no_profile and training.rampup_batch_size is None
        return ProfileWindow(begins if wanted else None, self.is_first, device)

    def _step(self, clock: Clock) -> None:
        """Train on the next global batch, with the profiler in its steps; the clock excludes these."""
        iteration = self.trainer.iteration + 1
        if not self.window.holds(iteration):
            self.step()
            return
        device = self.trainer.grid.device
        with clock.pause():
            since, held = time.perf_counter(), peak_memory_bytes(device)
            with self.window.step(iteration, self.trainer.optimizer):
                self.step()
            self.profiled_s.append(time.perf_counter() - since)
            self.profiler_bytes += peak_memory_bytes(device) - held
            if not self.window.holds(iteration + 1):
                # The first rank has read its events; steps that are timed begin together again.
                wait_for_ranks(device)
                if self.recorder is not None and self.window.parts is not None:
                    self.recorder.parts(iteration, self.window.parts)

    def step(self) -> None:
        """Train on the next global batch."""
        assert self.datasets.train is not None
        iteration = self.trainer.iteration + 1
        heartbeat.set_period(f"iteration {iteration}", iteration, in_step=True)
        self.batch = self.batches.at(self.consumed_samples)
        numbers = self.positions(self.consumed_samples, self.trainer.rows_of(self.batch))
        samples, starts = self.read(self.datasets.train, numbers)
        result = self.trainer.train_step(samples, starts)
        self.results.append(result)
        self.consumed_samples += self.batch
        self.slow_ranks.count_step()
        heartbeat.set_period(f"the run after iteration {iteration}", iteration)
        set_operation("logging")
        if self.samples is not None:
            self.samples.step(iteration, numbers, samples)
        guard = self.trainer.guard
        if guard is not None and guard.reason:
            if self.is_first:
                say(f"skipped iteration {iteration}: {guard.reason}")
            guard.stop_if_hopeless(iteration)

    def read(
        self, dataset: Samples, numbers: list[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Samples by their numbers, and the starts of their documents if known.

        A read error on one rank ends all ranks with its line.
        """
        set_operation("loading data")
        try:
            return dataset.batch(numbers), dataset.starts(numbers)
        except InputError as error:
            fail_alone(error)

    def positions(self, first: int, rows: Iterable[int]) -> list[int]:
        """Samples of this rank in the global batch that starts at sample `first`."""
        return [first + int(row) for row in rows]

    def log(self, elapsed_s: float) -> None:
        """Report the iterations since the last report.

        Args:
            elapsed_s: seconds of the iterations that were not profiled.
        """
        timed = len(self.results) - len(self.profiled_s)
        step_time_s = elapsed_s / timed if timed else sum(self.profiled_s) / len(self.profiled_s)
        device = self.trainer.grid.device
        peak = largest_of_ranks(peak_memory_bytes(device) - self.profiler_bytes, device)
        straggler = self.slow_ranks.line()
        losses = torch.stack([result.loss for result in self.results])
        kept = [number for number, result in enumerate(self.results) if not result.skipped]
        sequences = (self.consumed_samples - self.logged_samples) / len(self.results)
        metrics: dict[str, Any] = {
            "iteration": self.trainer.iteration,
            "loss": loss_of_updates(losses, kept),
            "learning_rate": self.results[-1].learning_rate,
            "grad_norm": float(self.results[-1].grad_norm),
            "step_time_s": step_time_s,
            "predicted_step_time_s": self.plan.estimate.step_time_s,
            **throughput(self.plan.model, self.plan.layout, self.plan.cluster, sequences / step_time_s),
            "peak_memory_bytes": peak,
            "nan_iterations": int((~losses.isfinite()).sum()),
            "loss_scale": self.results[-1].loss_scale,
            "skipped_iterations": len(self.results) - len(kept),
        }
        further = [result.further for result in self.results if result.further is not None]
        if further:
            metrics["mtp_losses"] = torch.stack([further[number] for number in kept or [-1]]).mean(0).tolist()
        if self.trainer.balance is not None:
            metrics |= expert_metrics(self.trainer.balance.report())
        if timed:
            self.figures.append((step_time_s, peak))
        else:
            metrics[PROFILED] = True
        self.results, self.profiled_s, self.logged_samples = [], [], self.consumed_samples
        if self.recorder is not None:
            # Before the lines, which a launcher shows in the form of their record.
            self.recorder.step(metrics, self.consumed_samples, self.batch)
        self._tell_step(metrics, sequences)
        if self.recorder is not None and straggler:
            self.recorder.straggler(self.trainer.iteration, straggler)
            say(straggler)

    def _tell_step(self, metrics: dict[str, Any], sequences: float) -> None:
        """Report the state of the run: the first rank to the user, other ranks to their own files."""
        tell = say if self.is_first else note
        last = self.job.training.train_iters
        if self.job.output.log_format == "mindformers":
            tell(mindformers_lines(metrics, last, sequences, dist.get_world_size(), datetime.now()))
        else:
            on_gpu = self.trainer.grid.device.type == "cuda"
            tell(log_line(metrics, last, self.consumed_samples, self.batch, datetime.now(), on_gpu))
        tell(progress_line(metrics, last, metrics["predicted_step_time_s"]))

    def evaluate(self) -> None:
        """Mean loss over the validation samples, the same ones every time."""
        iteration = self.trainer.iteration
        if self.datasets.valid is None or self.evaluated_at == iteration:
            return
        loss = self.mean_loss(self.datasets.valid)
        self.evaluated_at = iteration
        if self.recorder is not None:
            self.recorder.evaluation(iteration, loss, self.consumed_samples)
            say(evaluation_line(iteration, loss))

    def test(self) -> None:
        """Report the mean loss over the test samples, if the run has any."""
        if self.datasets.test is not None:
            loss = self.mean_loss(self.datasets.test)
            if self.recorder is not None:
                self.recorder.evaluation(self.trainer.iteration, loss, self.consumed_samples, "test")
                say(evaluation_line(self.trainer.iteration, loss, "test"))

    def mean_loss(self, samples: Samples) -> float:
        """Mean loss over --eval-iters global batches from the first sample on."""
        iteration = self.trainer.iteration
        heartbeat.set_period(f"the evaluation after iteration {iteration}", iteration)
        batch, rows = self.plan.layout.global_batch_size, self.trainer.rows
        losses = [
            self.trainer.evaluate(*self.read(samples, self.positions(number * batch, rows)))
            for number in range(self.job.output.eval_iters)
        ]
        return float(np.mean(losses))

    def save(self) -> None:
        """Write a checkpoint, or begin to write it."""
        assert self.saver is not None
        set_operation("saving a checkpoint")
        run = {
            "consumed_samples": self.consumed_samples,
            "train_samples": self.datasets.train_samples,
            **sample_order(self.job, self.datasets),
            **run_state(self.plan, self.trainer),
        }
        self.saver.save(self.trainer, self.plan.model, run)

    def _saver(self) -> Saver | None:
        output = self.job.output
        if output.save is None:
            return None
        from runtime.checkpoint import Saver  # Writers of tensors, which only runs that save need.

        return Saver(
            output.save,
            asynchronous=output.async_save,
            keep_last=output.keep_last,
            with_optimizer=not output.no_save_optim,
            report=say if self.is_first else lambda line: None,
        )

    def _sample_log(self) -> SampleLog | None:
        """The log file of samples of this data-parallel rank, which one rank of it writes."""
        folder = self.job.output.log_dir
        if not self.job.faults.log_samples or folder is None:
            return None
        if self.is_first:
            drop_samples_after(folder, self.trainer.iteration)
        grid = self.trainer.grid
        wait_for_ranks(grid.device)
        writes = grid.tp_rank == grid.cp_rank == grid.pp_rank == 0
        return SampleLog(folder, grid.dp_rank) if writes else None


class Clock:
    """A clock of training seconds, including device work."""

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
    def pause(self) -> Iterator[None]:
        """Exclude the time within this context; work queued before still counts."""
        self._synchronize()
        since = time.perf_counter()
        yield
        self._synchronize()
        self.started += time.perf_counter() - since

    def _synchronize(self) -> None:
        if is_accelerator(self.device):
            device_module(self.device).synchronize(self.device)
