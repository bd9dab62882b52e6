"""Adafactor (arXiv:1804.04235) on shards, as torch.optim.Adafactor on whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.optimizers.factored import (
    MeanSquares,
    Slots,
    WholeParameter,
    root_mean_squares,
    square_sum,
    sums_of_each,
)
from runtime.optimizers.sharding import sum_over
from runtime.optimizers.shards import ParameterShard

BETA2_DECAY = -0.8
"""Step t keeps 1 - t^-0.8 of the second moments (section 7.2)."""

LEAST_ROOT_SQUARE = torch.finfo(torch.float32).eps
"""The least root of a second moment; smaller moments are raised to its square (PyTorch's eps1)."""

LEAST_RMS = 1e-3
"""Least root mean square of a parameter in the relative step size (section 8)."""

LARGEST_RMS = 1.0
"""Largest root mean square of an update (section 6)."""

SLOTS = Slots("row_var", "col_var", "variance")
"""PyTorch's names of the second moments."""


def _normalise(gradient: Tensor, moments: MeanSquares, row_total: Tensor) -> None:
    """Divide the gradient by the root of its estimated second moment (algorithm 4)."""
    if moments.whole.is_matrix:
        mean = (row_total / moments.whole.rows).clamp_(min=LEAST_ROOT_SQUARE)
        estimate = (moments.row @ moments.column).div_(mean)
    else:
        estimate = moments.element.clone()
    gradient.mul_(estimate.clamp_(min=LEAST_ROOT_SQUARE**2).rsqrt_())


class Adafactor:
    """Adafactor without momentum, with PyTorch's default settings.

    Ranks that share a parameter exchange only sums: one number for each row and column, and two for the
    parameter, in three messages for each way to split parameters. Means of rows and columns are kept on the
    ranks of these rows and columns.
    """

    slots: tuple[str, ...] = SLOTS

    def __init__(self, owned: Sequence[ParameterShard], vocab: int, device: torch.device) -> None:
        self.moments = [MeanSquares(WholeParameter(one, vocab), SLOTS) for one in owned]
        self.device = device
        self.updates = 0

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        self.updates += 1
        moved = [m for m in self.moments if m.whole.owned.shard.grad is not None]
        updates = [g for m in moved if (g := m.whole.owned.shard.grad) is not None]
        weights = [(square_sum(m.whole.owned.shard), m.whole.groups) for m in moved]
        parts = [[weight, *m.sums(g)] for weight, m, g in zip(weights, moved, updates, strict=True)]
        sums = sums_of_each(parts, self.device)
        for moments, gradient, (_, *squares) in zip(moved, updates, sums, strict=True):
            moments.remember(gradient, squares, self.updates**BETA2_DECAY)
        totals = sum_over([m.row_total() for m in moved], self.device)
        for moments, gradient, total in zip(moved, updates, totals, strict=True):
            _normalise(gradient, moments, total)
        sizes = root_mean_squares([m.whole for m in moved], updates, self.device)
        relative = min(learning_rate, self.updates**-0.5)
        for moments, update, (weight, *_), size in zip(moved, updates, sums, sizes, strict=True):
            rate = (weight / moments.whole.size).sqrt_().clamp_(min=LEAST_RMS) * relative
            excess = (size / LARGEST_RMS).clamp_(min=1.0)
            owned = moments.whole.owned
            if owned.decayed:
                owned.shard.mul_(1.0 - learning_rate * weight_decay)
            owned.shard.sub_(update.mul_(rate / excess))

    def states(self) -> dict[str, Tensor]:
        return {name: mean for m in self.moments for name, mean in m.states(self.device).items()}

    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        for moments in self.moments:
            moments.load(states)
