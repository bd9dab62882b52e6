"""What `planner launch` says at the end of a job: what is kept, how to go on, how it ran."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from cli.tables import table, table_text
from costmodels.errors import InputError
from costmodels.spec.record import GIB, in_seconds
from planner.plan import Plan
from runtime.job.job import Job
from runtime.launch.measurement import Measurement, measurement
from runtime.launch.prediction import Prediction, predicted_peak, predicted_step
from runtime.launch.restarts import continuation
from runtime.launch.supervisor import Outcome
from runtime.logs.console import say


@dataclass(frozen=True)
class JobEnd:
    """What the end of a job is told with."""

    plan: Plan
    job: Job
    """With the file of the plan."""
    log_dir: Path
    """The folder of its logs, which the flags of the job need not name."""
    start: int = 0
    """The iteration that it began with."""

    def print(self, outcome: Outcome) -> None:
        """Say how the job ended, and how to go on; nothing that goes wrong here changes its exit code."""
        if outcome.message:
            say(f"planner: error: {outcome.message}", sys.stderr)
        elif outcome.stopped_by is not None:
            how = f"{outcome.stopped_by.name}: all ranks have ended, their output is in {self.log_dir}"
            say(f"planner: stopped by {how}", sys.stderr)
        try:
            for line in self.lines():
                say(line)
        except Exception as error:
            say(f"planner: warning: cannot say how it ran ({type(error).__name__}: {error})", sys.stderr)

    def lines(self) -> Iterator[str]:
        """The last checkpoint, the command that goes on from it, and measured against predicted figures."""
        yield from self.checkpoint_lines()
        figures = measurement(self.log_dir, self.start)
        if figures is not None:
            yield from comparison(self.plan, figures)

    def checkpoint_lines(self) -> Iterator[str]:
        """The last checkpoint and how to go on."""
        save, last = self.job.output.save, self.job.training.train_iters
        if save is None:
            yield "no checkpoint was kept: --save FOLDER keeps one"
            return
        from runtime.checkpoint import iteration_folder, latest_iteration

        try:
            iteration = latest_iteration(save)
        except InputError as error:
            yield str(error)
            return
        if iteration is None:
            yield f"there is no checkpoint in {save} yet"
            return
        yield f"last checkpoint: {iteration_folder(save, iteration)}, of iteration {iteration} of {last}"
        if iteration < last:
            yield f"to go on: {self.command()}"
        else:
            yield f"to train longer, such as twice as long: {self.command(2 * last)}"

    def command(self, train_iters: int | None = None) -> str:
        """The command that goes on from the last checkpoint, to the same iteration unless told otherwise."""
        job = continuation(self.job)
        if train_iters is not None:
            job = replace(job, training=replace(job.training, train_iters=train_iters))
        return shlex.join(["planner", "launch", *job.arguments()])


def prediction_lines(plan: Plan, iterations: int) -> Iterator[str]:
    """What the plan promises of a run of so many iterations."""
    step, peak, estimate = predicted_step(plan), predicted_peak(plan), plan.estimate
    run = timedelta(seconds=round(step.value * iterations))
    yield f"predicted: {in_seconds(step.value)} a step ({_seconds(step)}), {run} for {iterations} iterations"
    yield (
        f"predicted: {_peak_name(plan)} {peak.value / GIB:.3g} GiB ({_gib(peak)}); a rank takes "
        f"{estimate.peak_memory_bytes / GIB:.2f} of {plan.cluster.memory_bytes / GIB:.1f} GiB"
    )


def comparison(plan: Plan, figures: Measurement) -> Iterator[str]:
    """A table of predicted and measured figures, and what to make of those out of their range."""
    step, peak = predicted_step(plan), predicted_peak(plan)
    rows = [
        _row("step time (s)", step.value, figures.step_time_s),
        _row(f"{_peak_name(plan)} (GiB)", peak.value / GIB, figures.peak_memory_bytes / GIB),
    ]
    yield table_text(table(["", "predicted", "measured", "predicted / measured"], rows, left=("",)))
    if step.holds(figures.step_time_s):
        yield f"the step is in the predicted range, {_seconds(step)}"
    else:
        slower = figures.step_time_s > step.high
        yield (
            f"the step is {'slower' if slower else 'faster'} than the predicted range, {_seconds(step)}: "
            + _cause(plan, slower)
        )
    if peak.holds(figures.peak_memory_bytes):
        yield f"the peak is in the predicted range, {_gib(peak)}"
    else:
        larger = figures.peak_memory_bytes > peak.value
        yield f"the peak is {'above' if larger else 'below'} the predicted range, {_gib(peak)}: " + (
            "give --memory-margin-gib that much more before a plan that fills its devices"
            if larger
            else "ranks of one CPU share what they import, which the plan counts for each"
            if plan.cluster.device.kind == "cpu"
            else "the plan has room that it does not count on"
        )


def _peak_name(plan: Plan) -> str:
    """What of a rank's peak is measured."""
    return "peak memory" if plan.cluster.device.kind == "cpu" else "peak of tensors"


def _seconds(range_s: Prediction) -> str:
    return f"{in_seconds(range_s.low)} to {in_seconds(range_s.high)}"


def _gib(range_bytes: Prediction) -> str:
    return f"{range_bytes.low / GIB:.3g} to {range_bytes.high / GIB:.3g} GiB"


def _cause(plan: Plan, slower: bool) -> str:
    if plan.cluster.device.kind == "cpu":
        return "CPUs are shared and vary; other plans are off alike"
    if slower:
        return "look for a slow rank (--straggler-factor), a busy device, or links below their rating"
    return "give the links and the device as they are, so that plans rank right"


def _row(name: str, predicted: float, seen: float) -> list[str]:
    return [name, f"{predicted:.4g}", f"{seen:.4g}", f"{predicted / seen:.2f}"]
