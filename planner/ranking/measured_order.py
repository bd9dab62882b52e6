"""Expected step times of plans, given the measured steps of a few of them.

A measured step is its prediction times a factor. The logarithm of that factor is a sum of normal parts:

- a part that is common to all plans on a machine;
- a part for each term of the step, in proportion to the term's share of it;
- a part that similar layouts share;
- noise.

So measured plans give the factors of the others and their uncertainty in closed form (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, equations 2.23 and 2.24).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.spec.estimate import StepTime
from costmodels.spec.layout import Layout
from costmodels.spec.table import Floats
from planner.plan import Plan

COMMON = 3.0
"""Standard deviation of the part that all plans share; a machine may be ten times as slow as predicted."""

OF_TERM = 0.4
"""Standard deviation of the part of each term of the step."""

OF_LAYOUT = 0.4
"""Standard deviation of the part that similar layouts share, over the standard deviation of the prediction.
The range of an estimate is narrow on measured devices and wide on others."""

NOISE = 0.015
"""Standard deviation of the measured median of a few steps."""

REACH = 2.0
"""Number of doublings of degrees and of other different choices at which two layouts share e^-1 of that
part."""

SURE = 1.6449
"""Number of standard deviations below the mean that 19 of 20 values exceed."""

OF_RANGE = 1.2816
"""Half the width of an 80 % prediction interval, in standard deviations."""

_DEGREES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "data_parallel",
    "micro_batch_size",
    "micro_batches",
)
_CHOICES = ("schedule", "zero_stage", "recompute", "sequence_parallel", "context_parallel_form")


@dataclass(frozen=True)
class Expected:
    """Expected seconds of a plan's step, given measurements of other plans."""

    step_time_s: float
    low_s: float
    """Seconds that 19 of 20 such plans exceed."""
    high_s: float


def expected_steps(plans: Sequence[Plan], measured: Mapping[int, float]) -> list[Expected]:
    """Expected seconds of each plan's step, given measured steps of some plans by their place in `plans`."""
    predicted = np.log([plan.estimate.step_time_s for plan in plans])
    together = _covariance(plans)
    known = np.array(sorted(measured), dtype=np.int64)
    mean, variance = predicted, together.diagonal().copy()
    if len(known):
        seen = np.log([measured[place] for place in known.tolist()])
        inner = together[np.ix_(known, known)] + NOISE**2 * np.eye(len(known))
        weights = np.linalg.solve(inner, together[known])
        mean = predicted + weights.T @ (seen - predicted[known])
        variance = variance - (together[known] * weights).sum(axis=0)
        # Measured plans that should be alike and were not make the others no surer than that.
        off = seen - predicted[known]
        variance = variance * max(1.0, float(off @ np.linalg.solve(inner, off)) / len(known))
    width = SURE * np.sqrt(np.maximum(variance, 0.0) + NOISE**2)
    ends = zip(*(np.exp(each).tolist() for each in (mean, mean - width, mean + width)), strict=True)
    return [Expected(*each) for each in ends]


def _covariance(plans: Sequence[Plan]) -> Floats:
    """Covariances of the logarithms of measured over predicted steps, [n, n]."""
    terms = list(StepTime.model_fields)
    shares = np.array([[getattr(plan.estimate.time, name) for name in terms] for plan in plans])
    shares /= shares.sum(axis=1, keepdims=True)
    apart = np.array([[_difference(one.layout, other.layout) for other in plans] for one in plans])
    ranges = [plan.estimate.step_time_high_s / plan.estimate.step_time_low_s for plan in plans]
    own = OF_LAYOUT * np.log(ranges) / (2 * OF_RANGE)
    result: Floats = COMMON**2 + OF_TERM**2 * shares @ shares.T + np.outer(own, own) * np.exp(-apart / REACH)
    return result


def _difference(one: Layout, other: Layout) -> float:
    """The distance of two layouts: doublings of degrees, and other choices."""
    doublings = sum(abs(math.log2(getattr(one, name) / getattr(other, name))) for name in _DEGREES)
    return float(doublings + sum(getattr(one, name) != getattr(other, name) for name in _CHOICES))
