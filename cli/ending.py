"""What `planner launch` says at the end of a job: what is kept, how to go on, how it ran."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.restarts import going_on
from cli.tables import drawn, table
from costmodels.errors import InputError
from costmodels.words import GIB, in_seconds
from planner.flags import arguments
from planner.plan import Plan
from runtime.launch.torchrun import Measured, measured
from runtime.settings.options import OutputOptions, TrainingOptions

PEAK_WITHIN = 0.1
"""Share by which a measured peak may differ from the predicted one; tensors alone come out closer."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """What the end of a job is told with."""

    plan: Plan
    log_dir: Path
    training: TrainingOptions
    output: OutputOptions
    rest: Sequence[str]
    """Arguments of `planner launch` besides those of `training` and `output`."""
    start: int = 0
    """The iteration that the job began with."""

    def lines(self) -> Iterator[str]:
        """The last checkpoint, the command that goes on from it, and measured against predicted figures."""
        yield from self.kept()
        figures = measured(self.log_dir, self.start)
        if figures is not None:
            yield from compared(self.plan, figures)

    def kept(self) -> Iterator[str]:
        """The last checkpoint and how to go on."""
        save, last = self.output.save, self.training.train_iters
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
        training = self.training
        if train_iters is not None:
            training = dataclasses.replace(training, train_iters=train_iters)
        words = ["--plan", str(self.log_dir / "plan.json"), *arguments(training), *self.rest]
        return shlex.join(["planner", "launch", *words, *arguments(going_on(self.output))])


def peak_bytes(plan: Plan) -> tuple[str, float]:
    """What of a rank's peak is measured, and what the plan says of it."""
    if plan.cluster.device.kind == "cpu":
        return "peak memory", plan.estimate.peak_memory_bytes
    # A GPU's allocator counts tensors, not the driver's context or communication buffers.
    return "peak of tensors", max(stage.total - stage.overhead for stage in plan.estimate.memory)


def step_range(plan: Plan) -> str:
    """The range of the step time, for people."""
    estimate = plan.estimate
    return f"{in_seconds(estimate.step_time_low_s)} to {in_seconds(estimate.step_time_high_s)}"


def peak_range(plan: Plan) -> str:
    """The range of what is measured of the peak, for people."""
    low, high = (peak_bytes(plan)[1] * (1 + way * PEAK_WITHIN) / GIB for way in (-1, 1))
    return f"{low:.3g} to {high:.3g} GiB"


def compared(plan: Plan, figures: Measured) -> Iterator[str]:
    """A table of predicted and measured figures, and what to make of those out of their range."""
    estimate = plan.estimate
    what, peak = peak_bytes(plan)
    rows = [
        _row("step time (s)", estimate.step_time_s, figures.step_time_s),
        _row(f"{what} (GiB)", peak / GIB, figures.peak_memory_bytes / GIB),
    ]
    yield drawn(table(["", "predicted", "measured", "predicted / measured"], rows, left=("",)))
    seen = figures.step_time_s
    if estimate.step_time_low_s <= seen <= estimate.step_time_high_s:
        yield f"the step is in the predicted range, {step_range(plan)}"
    else:
        slower = seen > estimate.step_time_high_s
        yield (
            f"the step is {'slower' if slower else 'faster'} than the predicted range, {step_range(plan)}: "
            + _why(plan, slower)
        )
    if abs(figures.peak_memory_bytes / peak - 1) <= PEAK_WITHIN:
        yield f"the peak is in the predicted range, {peak_range(plan)}"
    else:
        larger = figures.peak_memory_bytes > peak
        yield f"the peak is {'above' if larger else 'below'} the predicted range, {peak_range(plan)}: " + (
            "give --memory-margin-gib that much more before a plan that fills its devices"
            if larger
            else "ranks of one CPU share what they import, which the plan counts for each"
            if plan.cluster.device.kind == "cpu"
            else "the plan has room that it does not count on"
        )


def _why(plan: Plan, slower: bool) -> str:
    if plan.cluster.device.kind == "cpu":
        return "CPUs are shared and vary; other plans are off alike"
    if slower:
        return "look for a slow rank (--straggler-factor), a busy device, or links below their rating"
    return "give the links and the device as they are, so that plans rank right"


def _row(name: str, predicted: float, seen: float) -> list[str]:
    return [name, f"{predicted:.4g}", f"{seen:.4g}", f"{predicted / seen:.2f}"]
