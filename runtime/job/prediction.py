"""Predictions of a plan for the figures that its job will measure."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan

PEAK_TOLERANCE = 0.1
"""Share by which a measured peak may differ from the predicted one; the peak of tensors alone is closer."""


@dataclass(frozen=True)
class Prediction:
    """A figure and the range in which its measurement is expected."""

    value: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        """Return whether a measurement is in the range."""
        return self.low <= measured <= self.high


def predicted_step(plan: Plan) -> Prediction:
    """The predicted seconds of a step."""
    estimate = plan.estimate
    return Prediction(estimate.step_time_s, estimate.step_time_low_s, estimate.step_time_high_s)


def predicted_peak(plan: Plan) -> Prediction:
    """The predicted peak bytes of the fullest rank, of the kind that is measured.

    A GPU's allocator counts tensors, not the driver's context or communication buffers.
    """
    if plan.cluster.device.kind == "cpu":
        peak = plan.estimate.peak_memory_bytes
    else:
        peak = max(stage.allocated for stage in plan.estimate.memory)
    return Prediction(peak, peak * (1 - PEAK_TOLERANCE), peak * (1 + PEAK_TOLERANCE))
