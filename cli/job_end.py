"""Lines that end `planner launch`: the last checkpoint, the command that resumes, and measured figures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from cli.tables import fitted
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.record import GIB, in_seconds
from planner.plan import Plan
from runtime.job.comparison import comparison, gib_range, peak_name, seconds_range
from runtime.job.job import Job
from runtime.job.measurement import measurement
from runtime.job.prediction import predicted_peak, predicted_step
from runtime.job.resumption import continuation
from runtime.launch.supervisor import Outcome
from runtime.logs.console import say


@dataclass(frozen=True)
class JobEnd:
    """The job and the plan that the last lines of `planner launch` tell about."""

    plan: Plan
    job: Job
    """The job, with the file of its plan."""
    log_dir: Path
    """The folder of the job's logs, which its flags need not name."""
    start: int = 0
    """The iteration that the job began with."""

    def print(self, outcome: Outcome) -> None:
        """Print the end of the job and the command that resumes it; errors here do not change the job's exit
        code."""
        print_outcome(outcome, self.log_dir)
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
            yield from map(fitted, comparison(self.plan, figures))

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


def print_outcome(outcome: Outcome, log_dir: Path) -> None:
    """Print on standard error the reason why a job ended early, if it did."""
    if outcome.message:
        say(f"planner: error: {outcome.message}", sys.stderr)
    elif outcome.stopped_by is not None:
        how = f"{outcome.stopped_by.name}: all ranks have ended, their output is in {log_dir}"
        say(f"planner: stopped by {how}", sys.stderr)


def prediction_lines(plan: Plan, iterations: int) -> Iterator[str]:
    """Lines with the predicted step time, run time and memory of a run of so many iterations."""
    step, peak, estimate = predicted_step(plan), predicted_peak(plan), plan.estimate
    run = timedelta(seconds=round(step.value * iterations))
    one = f"{in_seconds(step.value)} a step ({seconds_range(step)})"
    yield f"predicted: {one}, {run} for {iterations} iterations"
    yield (
        f"predicted: {peak_name(plan)} {peak.value / GIB:.3g} GiB ({gib_range(peak)}); a rank takes "
        f"{estimate.peak_memory_bytes / GIB:.2f} of {plan.cluster.memory_bytes / GIB:.1f} GiB"
    )
