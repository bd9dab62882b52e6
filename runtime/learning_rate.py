"""Learning-rate schedules: warm-up, then decay (Megatron-LM's optimizer_param_scheduler.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of each iteration.

    Args:
        peak: rate after warm-up.
        minimum: rate after `decay_iters` iterations.
        warmup_iters: iterations of linear rise from zero.
        decay_iters: iterations until the minimum, warm-up included.
    """

    peak: float
    minimum: float
    style: str
    warmup_iters: int
    decay_iters: int

    def at(self, iteration: int) -> float:
        """Rate after `iteration` updates; the first update is made with that of 0, as in Megatron-LM."""
        if self.warmup_iters and iteration <= self.warmup_iters:
            return self.peak * iteration / self.warmup_iters
        if self.style == "constant":
            return self.peak
        if iteration > self.decay_iters:
            return self.minimum
        done = (iteration - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
        share = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.minimum + share * (self.peak - self.minimum)
