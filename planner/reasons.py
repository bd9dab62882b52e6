"""Why a plan ranks where it does, in one line: against its nearest rival, by the parts of the step."""

from __future__ import annotations

from costmodels.spec.estimate import Estimate, StepTime
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB, in_seconds

Candidate = tuple[Layout, Estimate]


def ahead(winner: Candidate, runner_up: Candidate) -> str:
    """Why the first of the ranking leads the second."""
    gain = winner[1].tokens_per_s / runner_up[1].tokens_per_s - 1
    rival = runner_up[0].describe()
    if gain < 1e-8:
        return f"as fast as the next, {rival}, and simpler"
    return f"{_percent(gain)} more tokens/s than the next, {rival}: {_trade(winner[1], runner_up[1])}"


def behind(candidate: Candidate, best: Candidate) -> str:
    """Why a plan ranks behind the first."""
    loss = 1 - candidate[1].tokens_per_s / best[1].tokens_per_s
    if loss < 1e-8:
        return "as fast as the best, but less simple"
    return f"{_percent(loss)} fewer tokens/s than the best: {_trade(candidate[1], best[1])}"


def too_big(estimate: Estimate, cluster: Cluster) -> str:
    """What a plan lacks in memory."""
    stage = max(range(len(estimate.memory)), key=lambda rank: estimate.memory[rank].total)
    need, limit = estimate.peak_memory_bytes / GIB, cluster.memory_bytes / GIB
    return f"needs {need:.1f} GiB of {limit:.1f} GiB on pipeline rank {stage}: lacks {need - limit:.1f} GiB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 5e-4 else "under 0.1 %"


def _trade(estimate: Estimate, rival: Estimate) -> str:
    """The parts that differ most, for the tokens of one step of `estimate`."""
    tokens = estimate.tokens_per_s * estimate.step_time_s
    scale = tokens / (rival.tokens_per_s * rival.step_time_s)
    saved = {
        name: getattr(rival.time, name) * scale - getattr(estimate.time, name)
        for name in StepTime.model_fields
    }
    largest = sorted(saved, key=lambda name: -abs(saved[name]))[:3]
    words = [
        f"{in_seconds(abs(saved[name]))} {'less' if saved[name] > 0 else 'more'} {name.replace('_', ' ')}"
        for name in largest
        if abs(saved[name]) > 0.05 * abs(saved[largest[0]])
    ]
    return ", ".join(words) + " a step"
