"""Objectives of a search, and the metric by which each ranks plans."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.record import GIB
from costmodels.spec.table import Floats, Ints
from costmodels.spelling import or_nearest

if TYPE_CHECKING:
    from costmodels.pricing import Prices
    from costmodels.spec.estimate import Estimate

Objective = Literal["throughput", "step-time", "cost", "memory"]
"""The quantity by which plans are ranked; each layout runs the largest batch that it can, up to the one asked
for.

- `throughput`: tokens per second.
- `step-time`: seconds of one step. With an exact batch the order is that of `throughput`; with a maximum a
  shorter step wins even if it has fewer sequences.
- `cost`: device-hours per token, and so money. For one world size the order is that of `throughput`; for
  several sizes the most tokens per second of a device win.
- `memory`: the lowest peak of the fullest device. Peaks within a thousandth of each other are equal, and
  tokens per second decide.
"""

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

DEFAULT_OBJECTIVE: Objective = "throughput"

MEANINGS: dict[Objective, str] = {
    "throughput": "most tokens per second",
    "step-time": "shortest step",
    "cost": "fewest device-hours per token",
    "memory": "lowest peak of memory, equal ones by tokens per second",
}

EQUAL = 1e-8
"""Relative difference below which two figures are the same."""

SCORE_DIGITS = 9
"""Digits to which the logarithm of a ranking figure is rounded, so that rounding errors of sums do not
decide."""

MEMORY_DIGITS = 3
"""Digits to which the logarithm of a memory peak is rounded; equal ones are a tie."""


def parse_objective(text: str) -> Objective:
    """The objective of that name; raises `InputError` for an unknown one."""
    for objective in OBJECTIVES:
        if text.lower().replace("_", "-") == objective:
            return objective
    raise InputError(
        f"objective {text}: expected one of {', '.join(OBJECTIVES)}{or_nearest(text, OBJECTIVES)}"
    )


def equal_peak(peak_memory_bytes: float) -> float:
    """A number that ranks peaks of memory; peaks that count as equal have the same number."""
    return round(math.log(max(peak_memory_bytes, 1.0)), MEMORY_DIGITS)


def slowness(objective: Objective, sequences: Ints, seconds: Floats) -> Floats:
    """Seconds of a step, or of one of its sequences; the objective minimises it, up to a constant factor."""
    return seconds if objective == "step-time" else seconds / sequences


def logarithms(objective: Objective, prices: Prices) -> tuple[Floats, ...]:
    """Logarithms of the figures to minimise, [n] each; the first one decides, the next one breaks ties."""
    slowness = -np.log(prices.tokens_per_s)
    if objective == "step-time":
        return np.log(prices.step_time_s), slowness
    if objective == "memory":
        return np.log(prices.peak_memory_bytes).round(MEMORY_DIGITS), slowness
    return (slowness,)


METRICS: dict[Objective, str] = {
    "throughput": "tokens_per_s",
    "step-time": "step_time_s",
    "cost": "device_hours_per_billion_tokens",
    "memory": "peak_memory_gib",
}
"""The metric of each objective, with its unit."""


BILLION_PER_HOUR = 3600 / 1e9
"""Billions of tokens an hour in one token per second."""


def metric(objective: Objective, priced: Estimate | Prices) -> float:
    """The number that ranks a plan, in the unit of `METRICS`, from its estimate or from prices of one row."""
    source = {
        "throughput": priced.tokens_per_s,
        "step-time": priced.step_time_s,
        "cost": priced.tokens_per_s_per_device,
        "memory": priced.peak_memory_bytes,
    }
    value = float(np.ravel(source[objective])[0])
    if objective == "cost":
        return 1 / (value * BILLION_PER_HOUR)
    return value / GIB if objective == "memory" else value


def gain(objective: Objective, one: float, other: float) -> float:
    """The ratio by which metric `one` is better than `other`: above one where it is better."""
    return one / other if objective == "throughput" else other / one
