"""Schedules of the learning rate and of weight decay (Megatron-LM's optimizer_param_scheduler.py)."""

from __future__ import annotations

import math

from costmodels.dataclass import dataclass

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
"""Forms of the decay at the end of WSD (warm-up, stable, decay; arXiv:2404.06395, section 4)."""

WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of each iteration.

    Args:
        peak: rate after warm-up.
        minimum: rate after `decay_iters` iterations; the inverse square root never falls below it.
        warmup_iters: iterations of linear rise.
        decay_iters: iterations until the minimum, warm-up included.
        initial: rate at the start of warm-up.
        wsd_style: form of WSD's decay.
        wsd_decay_iters: number of the last iterations of `decay_iters`, in which WSD decays.
    """

    peak: float
    minimum: float
    style: str
    warmup_iters: int
    decay_iters: int
    initial: float = 0.0
    wsd_style: str = "exponential"
    wsd_decay_iters: int = 0

    def at(self, iteration: int) -> float:
        """Rate after `iteration` updates; the first update uses the rate of 0, as in Megatron-LM."""
        if self.warmup_iters and iteration <= self.warmup_iters:
            return self.initial + (self.peak - self.initial) * iteration / self.warmup_iters
        if self.style == "constant":
            return self.peak
        if iteration > self.decay_iters:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(self.warmup_iters, 1) / max(iteration, 1)))
        return self.minimum + self._share(iteration) * (self.peak - self.minimum)

    def _share(self, iteration: int) -> float:
        """The rate's position between minimum and peak, from 1 down to 0."""
        style, start = self.style, self.warmup_iters
        if style == "WSD":
            style, start = self.wsd_style, self.decay_iters - self.wsd_decay_iters
        done = max(0.0, (iteration - start) / (self.decay_iters - start))
        if style == "linear":
            return 1.0 - done
        if style == "exponential":
            return 2.0 * math.pow(0.5, done) - 1.0
        if style == "minus_sqrt":
            return 1.0 - math.sqrt(done)
        return 0.5 * (math.cos(math.pi * done) + 1.0)


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay of each iteration: from `start` to `end` over `incr_iters` iterations."""

    start: float
    end: float
    style: str
    incr_iters: int

    def at(self, iteration: int) -> float:
        """Weight decay after `iteration` updates."""
        if self.style == "constant" or iteration > self.incr_iters:
            return self.end
        done = iteration / self.incr_iters
        share = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.start + share * (self.end - self.start)
