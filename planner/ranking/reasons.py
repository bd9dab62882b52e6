"""The reason for the place of a plan in a ranking, with its lead or lag, in one line."""

from __future__ import annotations

import math
from typing import NamedTuple

from costmodels.spec.estimate import Estimate, StepTime
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB, in_seconds
from planner.objective import EQUAL, MEMORY_DIGITS, Objective, equal_peak, gain, metric

Candidate = tuple[Layout, Estimate]

PARTS = {
    "compute": "GEMMs",
    "elementwise": "element-wise kernels",
    "recompute": "recomputation",
    "launch": "kernel launches",
    "tensor_parallel": "tensor-parallel communication",
    "context_parallel": "context-parallel communication",
    "expert_parallel": "expert-parallel communication",
    "pipeline_parallel": "pipeline-parallel communication",
    "bubble": "pipeline bubble",
    "data_parallel": "data-parallel communication",
    "accumulation": "gradient accumulation",
    "optimizer": "optimizer step",
}
"""Names of the parts of a step that are clearer than the field names of `StepTime`."""


def lead_reason(objective: Objective, winner: Candidate, runner_up: Candidate) -> str:
    """The reason why the first plan of a ranking leads the second."""
    rival = runner_up[0].describe()
    lead = _difference(objective, winner, runner_up)
    if lead is not None:
        return f"{lead} than the next, {rival}, {_speed(winner, runner_up)}"
    more = winner[1].tokens_per_s / runner_up[1].tokens_per_s - 1
    if more < EQUAL:
        return f"as fast as the next, {rival}, and simpler"
    return f"{_percent(more)} faster than the next, {rival}: {_trade(winner[1], runner_up[1])}"


def lag_reason(objective: Objective, candidate: Candidate, best: Candidate) -> str:
    """The reason why a plan ranks behind the first."""
    lag = _difference(objective, candidate, best)
    if lag is not None:
        return f"{lag} than the best, {_speed(candidate, best)}"
    slower = 1 - candidate[1].tokens_per_s / best[1].tokens_per_s
    if slower < EQUAL:
        return "as fast as the best, but less simple"
    return f"{_percent(slower)} slower than the best: {_trade(candidate[1], best[1])}"


def preferred_reason(objective: Objective, winner: Candidate, fastest: Candidate, room: Room) -> str:
    """The reason why the first plan is ranked before a plan with a faster estimate."""
    what = f"the fastest, {fastest[0].describe()}"
    lead = f"{lead_share(objective, fastest[1], winner[1])} faster"
    if room.lacks(fastest[1]) and not room.lacks(winner[1]):
        return (
            f"leaves {room.left_gib(winner[1]):.1f} GiB of memory; {what}, is {lead} and leaves "
            f"{room.left_gib(fastest[1]):.1f} GiB"
        )
    return f"simpler than {what}, which is {lead}"


def ahead_reason(objective: Objective, candidate: Candidate, best: Candidate, room: Room) -> str:
    """The reason why a plan with a faster estimate than the first plan is not ranked before it."""
    lead = f"{lead_share(objective, candidate[1], best[1])} faster than the first by the estimate"
    if room.lacks(candidate[1]) and not room.lacks(best[1]):
        return f"{lead}, and leaves {room.left_gib(candidate[1]):.1f} GiB of memory"
    return f"{lead}, and less simple"


def lead_share(objective: Objective, one: Estimate, other: Estimate) -> str:
    """The share by which the first plan is better than the second, in percent."""
    return _percent(gain(objective, metric(objective, one), metric(objective, other)) - 1)


class Room(NamedTuple):
    """The memory that plans should leave on the fullest device."""

    memory_bytes: float
    headroom_bytes: float

    def left_gib(self, estimate: Estimate) -> float:
        """GiB that a plan leaves free."""
        return (self.memory_bytes - estimate.peak_memory_bytes) / GIB

    def lacks(self, estimate: Estimate) -> bool:
        """Return whether a plan leaves less memory free than it should."""
        return estimate.peak_memory_bytes > self.memory_bytes - self.headroom_bytes


def memory_reason(estimate: Estimate, cluster: Cluster) -> str:
    """The reason why a plan does not fit: the GiB that it lacks."""
    stage = max(range(len(estimate.memory)), key=lambda rank: estimate.memory[rank].total)
    need, limit = estimate.peak_memory_bytes / GIB, cluster.memory_bytes / GIB
    return f"needs {need:.1f} GiB of {limit:.1f} GiB on pipeline rank {stage}: lacks {need - limit:.1f} GiB"


def metric_text(objective: Objective, value: float) -> str:
    """A metric with its unit."""
    if objective == "step-time":
        return f"step {in_seconds(value)}"
    if objective == "cost":
        hours = f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
        return f"{hours} device-hours per 1e9 tokens"
    return f"peak {value:.2f} GiB" if objective == "memory" else f"{value:,.0f} tokens/s"


def gain_text(objective: Objective, value: float, before: float) -> str:
    """The gain of a metric of `value` instead of `before`."""
    if objective in ("throughput", "cost"):
        return f"{gain(objective, value, before):.2f} x the tokens/s"
    if objective == "step-time":
        return f"a step of {in_seconds(value)} instead of {in_seconds(before)}"
    return f"a {metric_text(objective, value)} instead of {before:.2f} GiB"


def lead_text(objective: Objective, one: Estimate, other: Estimate) -> str:
    """The lead of the first plan over the second, which must not rank higher."""
    mine, theirs = metric(objective, one), metric(objective, other)
    better = gain(objective, mine, theirs) - 1
    equal = better < EQUAL
    if objective == "memory":
        equal = round(math.log(mine), MEMORY_DIGITS) == round(math.log(theirs), MEMORY_DIGITS)
    if equal:
        # The next thing that counts decides.
        return "as fast as" if objective in ("throughput", "cost") else lead_text("throughput", one, other)
    less = better if objective in ("throughput", "cost") else 1 - mine / theirs
    share = _percent(less)
    if objective == "memory":
        return f"{theirs - mine:.2f} GiB ({share}) less at the peak than"
    return f"a step shorter by {share} than" if objective == "step-time" else f"{share} more tokens/s than"


def _difference(objective: Objective, one: Candidate, other: Candidate) -> str | None:
    """The difference of two plans in the objective; None where tokens per second decide their order."""
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


def _speed(one: Candidate, other: Candidate) -> str:
    ratio = one[1].tokens_per_s / other[1].tokens_per_s
    if abs(ratio - 1) < EQUAL:
        return "at as many tokens/s"
    return f"at {100 * abs(ratio - 1):.1f} % {'more' if ratio > 1 else 'fewer'} tokens/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 5e-4 else "under 0.1 %"


def _trade(estimate: Estimate, rival: Estimate) -> str:
    """The parts of the step that differ most, normalised to one step of `estimate`."""
    tokens = estimate.tokens_per_s * estimate.step_time_s
    scale = tokens / (rival.tokens_per_s * rival.step_time_s)
    saved = {
        name: getattr(rival.time, name) * scale - getattr(estimate.time, name)
        for name in StepTime.model_fields
    }
    largest = sorted(saved, key=lambda name: -abs(saved[name]))[:3]
    words = [
        f"{'-' if saved[name] > 0 else '+'}{in_seconds(abs(saved[name]))} of {PARTS.get(name, name)}"
        for name in largest
        if abs(saved[name]) > 0.05 * abs(saved[largest[0]])
    ]
    return ", ".join(words) + " a step"
