"""Log lines about steps: the progress of a run with its prediction, and MindFormers' line."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from costmodels.spec.record import in_seconds

PROGRESS_START = "progress: "

BAR = 50
"""Width of MindFormers' bar, in characters."""


def progress_line(metrics: Mapping[str, Any], train_iters: int, predicted_s: float) -> str:
    """A line of progress: finished steps, the expected end, and measured against predicted seconds."""
    done, step_s = metrics["iteration"], metrics["step_time_s"]
    left = timedelta(seconds=round(step_s * (train_iters - done)))
    return (
        f"{PROGRESS_START}{done} of {train_iters} steps ({100 * done / train_iters:.1f} %), ETA {left}; "
        f"{in_seconds(step_s)} a step, {step_s / predicted_s:.2f} x the predicted {in_seconds(predicted_s)}"
    )


def mindformers_lines(
    metrics: Mapping[str, Any], train_iters: int, sequences_per_step: float, devices: int, now: datetime
) -> str:
    """The two lines of MindFormers' MFLossMonitor, for tools that read them; a run has one epoch.

    Source: MindFormers, mindformers/core/callback/callback.py.
    """
    done, step_s = metrics["iteration"], metrics["step_time_s"]
    start = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} - planner - INFO - "
    share = done / train_iters
    bar = "█" * int(BAR * share)
    left = timedelta(seconds=int(step_s * (train_iters - done)))
    overflow = metrics["skipped_iterations"] > 0
    return (
        f"{start}{{ Epoch:[{1:3d}/{1:3d}], step:[{done:5d}/{train_iters:5d}], loss: {metrics['loss']:5.3f}, "
        f"per_step_time: {int(1000 * step_s)}ms, lr: {metrics['learning_rate']:.6g}, overflow cond: "
        f"{overflow}, "
        f"loss_scale: {metrics['loss_scale']}, global_norm: [{metrics['grad_norm']:.6g}], "
        f"train_throughput_per_npu: {metrics['tflops_per_device']:.3f}T\n"
        f"{start}  {100 * share:4.1f}% |{bar:<{BAR}}| {sequences_per_step / step_s / devices:.5f} "
        f"samples/s/p  "
        f"{left} }}"
    )
