"""The figure that an objective ranks plans by, in units that people read."""

from __future__ import annotations

import math

import numpy as np

from costmodels.pricing import Prices
from costmodels.spec.estimate import Estimate
from costmodels.spec.record import GIB, in_seconds
from planner.objective import EQUAL, MEMORY_DIGITS, Objective

NAMES: dict[Objective, str] = {
    "throughput": "tokens_per_s",
    "step-time": "step_time_s",
    "cost": "device_hours_per_billion_tokens",
    "memory": "peak_memory_gib",
}
"""What the figure of an objective is, with its unit."""

BILLION_PER_HOUR = 3600 / 1e9
"""Billions of tokens an hour that one token per second is."""


def figure(objective: Objective, priced: Estimate | Prices) -> float:
    """What a plan is ranked by, in the unit of `NAMES`; of its estimate, or of prices of one row."""
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
    """How many times better figure `one` is than `other`: above one where it is better."""
    return one / other if objective == "throughput" else other / one


def in_words(objective: Objective, value: float) -> str:
    """A figure with its unit."""
    if objective == "step-time":
        return f"step {in_seconds(value)}"
    if objective == "cost":
        hours = f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
        return f"{hours} device-hours per 1e9 tokens"
    return f"peak {value:.2f} GiB" if objective == "memory" else f"{value:,.0f} tokens/s"


def bought(objective: Objective, value: float, before: float) -> str:
    """What is had with a figure of `value` instead of `before`."""
    if objective in ("throughput", "cost"):
        return f"{gain(objective, value, before):.2f} x the tokens/s"
    if objective == "step-time":
        return f"a step of {in_seconds(value)} instead of {in_seconds(before)}"
    return f"a {in_words(objective, value)} instead of {before:.2f} GiB"


def lead(objective: Objective, one: Estimate, other: Estimate) -> str:
    """By how much the first, which ranks no lower, is better than the second."""
    mine, theirs = figure(objective, one), figure(objective, other)
    better = gain(objective, mine, theirs) - 1
    equal = better < EQUAL
    if objective == "memory":
        equal = round(math.log(mine), MEMORY_DIGITS) == round(math.log(theirs), MEMORY_DIGITS)
    if equal:
        # The next thing that counts decides.
        return "as fast as" if objective in ("throughput", "cost") else lead("throughput", one, other)
    less = better if objective in ("throughput", "cost") else 1 - mine / theirs
    share = f"{100 * less:.1f} %" if less >= 5e-4 else "under 0.1 %"
    if objective == "memory":
        return f"{theirs - mine:.2f} GiB ({share}) less at the peak than"
    return f"a step shorter by {share} than" if objective == "step-time" else f"{share} more tokens/s than"
