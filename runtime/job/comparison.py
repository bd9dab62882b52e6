"""Comparison of a job's measured figures with its plan's predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from costmodels.spec.record import GIB, in_seconds
from planner.plan import Plan
from runtime.job.drift import likely_wrong
from runtime.job.measurement import Measurement
from runtime.job.prediction import Prediction, predicted_peak, predicted_step


def comparison(plan: Plan, figures: Measurement) -> Iterator[str]:
    """A table of predicted and measured figures, with explanations of figures out of their range."""
    step, peak = predicted_step(plan), predicted_peak(plan)
    rows = [
        _row("step time (s)", step.value, figures.step_time_s),
        _row(f"{peak_name(plan)} (GiB)", peak.value / GIB, figures.peak_memory_bytes / GIB),
    ]
    yield from _columns([["", "predicted", "measured", "predicted / measured"], *rows])
    if step.holds(figures.step_time_s):
        yield f"the step is in the predicted range, {seconds_range(step)}"
    else:
        slower = figures.step_time_s > step.high
        how = "slower" if slower else "faster"
        cause = _cause(plan, slower) if figures.parts is None else likely_wrong(plan, figures.parts, slower)
        yield f"the step is {how} than the predicted range, {seconds_range(step)}: {cause}"
    if peak.holds(figures.peak_memory_bytes):
        yield f"the peak is in the predicted range, {gib_range(peak)}"
    else:
        larger = figures.peak_memory_bytes > peak.value
        yield f"the peak is {'above' if larger else 'below'} the predicted range, {gib_range(peak)}: " + (
            "give --memory-margin-gib that much more before a plan that fills its devices"
            if larger
            else "what a process of this build of PyTorch takes is a guess, which `planner calibrate` "
            "measures"
            if plan.cluster.device.kind == "cpu"
            else "the plan has room that it does not count on"
        )


def peak_name(plan: Plan) -> str:
    """The name of the measured peak of a rank."""
    return "peak memory" if plan.cluster.device.kind == "cpu" else "peak of tensors"


def seconds_range(range_s: Prediction) -> str:
    """The range of a time in words."""
    return f"{in_seconds(range_s.low)} to {in_seconds(range_s.high)}"


def gib_range(range_bytes: Prediction) -> str:
    """The range of a size in words."""
    return f"{range_bytes.low / GIB:.3g} to {range_bytes.high / GIB:.3g} GiB"


def _cause(plan: Plan, slower: bool) -> str:
    if plan.cluster.device.kind == "cpu":
        return "CPUs are shared and vary; other plans are off alike"
    if slower:
        return "look for a slow rank (--straggler-factor), a busy device, or links below their rating"
    return "give the links and the device as they are, so that plans rank right"


def _row(name: str, predicted: float, seen: float) -> list[str]:
    return [name, f"{predicted:.4g}", f"{seen:.4g}", f"{predicted / seen:.2f}"]


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table with a left-aligned first column."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for first, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield " ".join([first.ljust(widths[0]), *numbers])
