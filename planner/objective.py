"""Objectives: what the best plan is best at."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

from costmodels.errors import InputError
from costmodels.pricing import Prices
from costmodels.spec.record import GIB
from costmodels.spec.table import Floats
from planner import reasons

Objective = Literal["throughput", "step-time", "cost", "memory"]
"""What a plan is to be best at; each layout runs the largest batch that it can, up to the one asked for.

`throughput` is tokens per second. `step-time` is seconds of one step: with an exact batch the same order,
with a maximum a shorter step wins even if it is of fewer sequences. `cost` is device-hours per token, and so
money: for one world size the same order, for several the one with most tokens per second of a device wins.
`memory` is the lowest peak of the fullest device; those within a thousandth are equal, and go by tokens per
second.
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

MEMORY_DIGITS = 3
"""Digits of the natural logarithm of peaks of memory that are told apart."""


def parse_objective(text: str) -> Objective:
    """The objective of that name; raises `InputError` for an unknown one."""
    for objective in OBJECTIVES:
        if text.lower().replace("_", "-") == objective:
            return objective
    raise InputError(f"objective {text}: expected one of {', '.join(OBJECTIVES)}")


def equal_peak(peak_memory_bytes: float) -> float:
    """A number that is the same for peaks of memory that count as equal, and larger for larger ones."""
    return round(math.log(max(peak_memory_bytes, 1.0)), MEMORY_DIGITS)


def logarithms(objective: Objective, prices: Prices) -> tuple[Floats, ...]:
    """Logarithms of what is to be least, [n] each; the first decides, the next one where it is equal."""
    slowness = -np.log(prices.tokens_per_s)
    if objective == "step-time":
        return np.log(prices.step_time_s), slowness
    if objective == "memory":
        return np.log(prices.peak_memory_bytes).round(MEMORY_DIGITS), slowness
    return (slowness,)


def ahead(objective: Objective, winner: reasons.Candidate, runner_up: reasons.Candidate) -> str:
    """Why the first of a ranking leads the second."""
    rival = runner_up[0].describe()
    lead = _difference(objective, winner, runner_up)
    if lead is None:
        return reasons.ahead(winner, runner_up)
    return f"{lead} than the next, {rival}, {_speed(winner, runner_up)}"


def behind(objective: Objective, candidate: reasons.Candidate, best: reasons.Candidate) -> str:
    """Why a plan ranks behind the first."""
    lag = _difference(objective, candidate, best)
    if lag is None:
        return reasons.behind(candidate, best)
    return f"{lag} than the best, {_speed(candidate, best)}"


def _difference(objective: Objective, one: reasons.Candidate, other: reasons.Candidate) -> str | None:
    """How one differs from another in what counts; None where their tokens per second decide."""
    if objective == "memory":
        held, rival = one[1].peak_memory_bytes, other[1].peak_memory_bytes
        if equal_peak(held) == equal_peak(rival):
            return None
        share = f"{100 * abs(held / rival - 1):.1f} %"
        return f"{abs(held - rival) / GIB:.2f} GiB ({share}) {'less' if held < rival else 'more'} at the peak"
    if objective == "step-time" and one[0].global_batch_size != other[0].global_batch_size:
        ratio = one[1].step_time_s / other[1].step_time_s
        share = f"{100 * abs(ratio - 1):.1f} % {'shorter' if ratio < 1 else 'longer'}"
        sequences = f"{one[0].global_batch_size} sequences instead of {other[0].global_batch_size}"
        return f"a step of {sequences}, {share}"
    return None


def _speed(one: reasons.Candidate, other: reasons.Candidate) -> str:
    ratio = one[1].tokens_per_s / other[1].tokens_per_s
    if abs(ratio - 1) < EQUAL:
        return "at as many tokens/s"
    return f"at {100 * abs(ratio - 1):.1f} % {'more' if ratio > 1 else 'fewer'} tokens/s"
