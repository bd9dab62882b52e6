"""Loss scaling of fp16 training (Micikevicius et al., arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodels import Layout
from runtime.settings.training_options import TrainingOptions

GROWTH, BACKOFF = 2.0, 0.5
"""Factors by which a dynamic scale grows and falls, as in Megatron-LM."""


@dataclass
class LossScale:
    """The factor of the loss that keeps small gradients from vanishing in fp16.

    A step whose gradient overflows changes nothing but the scale. A dynamic scale follows Megatron-LM's
    DynamicGradScaler. It halves at overflow number `hysteresis` and at each later one, and doubles after
    `window` steps in a row without an overflow. Only then does the count of overflows restart.
    """

    value: float
    dynamic: bool
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    overflows_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.overflows_left = self.hysteresis

    @property
    def can_fall(self) -> bool:
        """True if an overflow can make the scale smaller."""
        return self.dynamic and self.value > self.minimum

    def update(self, overflow: bool) -> None:
        """Update the scale after a step; all ranks must pass the same values."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.value = max(self.value * BACKOFF, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps = 0
            self.overflows_left = self.hysteresis
            self.value *= GROWTH

    def state(self) -> dict[str, float]:
        """The entries of a checkpoint for `load`."""
        return {
            "value": self.value,
            "good_steps": self.good_steps,
            "overflows_left": self.overflows_left,
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from the `state` in a checkpoint; a constant scale keeps the flag's value."""
        if self.dynamic:
            self.value = state["value"]
            self.good_steps = int(state["good_steps"])
            self.overflows_left = int(state["overflows_left"])


def loss_scale_of(options: TrainingOptions, layout: Layout) -> LossScale | None:
    """The initial scale of a run; None for formats other than fp16."""
    if layout.precision != "fp16":
        return None
    if options.loss_scale is not None:
        return LossScale(options.loss_scale, dynamic=False)
    return LossScale(
        options.initial_loss_scale,
        dynamic=True,
        minimum=options.min_loss_scale,
        window=options.loss_scale_window,
        hysteresis=options.hysteresis,
    )
