"""CAME (arXiv:2307.02047) on shards, equal to MindFormers' `Came` on whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.optimizers.factored import MeanSquares, Slots, WholeParameter, root_mean_squares, sums_of_each
from runtime.optimizers.sharding import sum_over
from runtime.optimizers.shards import ParameterShard
from runtime.parallel.local_tensors import like_parameter, local_part
from runtime.settings.training_options import TrainingOptions

LEAST_SQUARE = 1e-30
"""Term added to each squared gradient (the paper's first epsilon)."""

LEAST_INSTABILITY = 1e-16
"""Term added to each square of an update's distance to the momentum (the paper's second epsilon)."""

LEAST_SHARE = torch.finfo(torch.float32).tiny
"""Least ratio of a row's mean to that of all rows, so that its root has a reciprocal in fp32."""

MOMENTUM = "exp_avg"
SQUARES = Slots("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
INSTABILITIES = Slots("exp_avg_insta_row", "exp_avg_insta_col", "")
"""MindFormers' names of the state."""


def _divide_by_root(tensor: Tensor, means: MeanSquares, row_total: Tensor) -> None:
    """Divide a matrix by the root of the estimated mean square of each element (algorithm 2).

    It is divided first by the row's share and then by the column, as their product may be too small for fp32.
    """
    mean = row_total / means.whole.rows
    tensor.mul_((means.row / mean).clamp_(min=LEAST_SHARE).rsqrt_())
    tensor.mul_(means.column.rsqrt())


class Came:
    """CAME with MindFormers' settings: step t keeps 1 - t^-`decay_rate` of the squares of gradients.

    An update is a gradient over the root of its mean square, and is averaged in a momentum. The step is the
    momentum divided by the root mean square of the updates' distance from it, so steps are longer where
    updates are close to the momentum. For vectors the step is the momentum itself. Ranks exchange sums only,
    as for Adafactor, in five messages for each way to split parameters.
    """

    slots: tuple[str, ...] = (MOMENTUM, *SQUARES, INSTABILITIES.row, INSTABILITIES.column)

    def __init__(
        self, owned: Sequence[ParameterShard], vocab: int, options: TrainingOptions, device: torch.device
    ) -> None:
        self.parameters = [_State(WholeParameter(one, vocab)) for one in owned]
        self.options = options
        self.device = device
        self.updates = 0

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        self.updates += 1
        # Updates, and then steps, take the memory of the gradients.
        moved = [(p, g) for p in self.parameters if (g := p.whole.owned.shard.grad) is not None]
        self._normalise(moved)
        self._follow(moved)
        for one, step in moved:
            owned = one.whole.owned
            if owned.decayed:
                owned.shard.mul_(1.0 - learning_rate * weight_decay)
            owned.shard.sub_(step, alpha=learning_rate)

    def _normalise(self, moved: Sequence[tuple[_State, Tensor]]) -> None:
        """Turn gradients into updates: divided by the roots of their mean squares, and clipped."""
        weight = self.updates**-self.options.came_decay_rate
        sums = sums_of_each([one.squares.sums(gradient) for one, gradient in moved], self.device)
        for (one, gradient), squares in zip(moved, sums, strict=True):
            one.squares.remember(gradient, squares, weight, least=LEAST_SQUARE)
        totals = sum_over([one.squares.row_total() for one, _ in moved], self.device)
        for (one, gradient), total in zip(moved, totals, strict=True):
            if one.whole.is_matrix:
                _divide_by_root(gradient, one.squares, total)
            else:
                gradient.mul_(one.squares.element.rsqrt())
        wholes, updates = [one.whole for one, _ in moved], [update for _, update in moved]
        for update, size in zip(updates, root_mean_squares(wholes, updates, self.device), strict=True):
            update.div_((size / self.options.came_clip_threshold).clamp_(min=1.0))

    def _follow(self, moved: Sequence[tuple[_State, Tensor]]) -> None:
        """Turn updates into steps: the momentum of updates, divided by the roots of its instabilities."""
        for one, update in moved:
            one.momentum.lerp_(update, 1.0 - self.options.came_beta1)
            update.sub_(one.momentum)
        matrices = [(means, far) for one, far in moved if (means := one.instabilities) is not None]
        sums = sums_of_each([means.sums(far) for means, far in matrices], self.device)
        for (means, far), squares in zip(matrices, sums, strict=True):
            means.remember(far, squares, 1.0 - self.options.came_beta3, least=LEAST_INSTABILITY)
        totals = sum_over([means.row_total() for means, _ in matrices], self.device)
        for one, step in moved:
            step.copy_(one.momentum)
        for (means, step), total in zip(matrices, totals, strict=True):
            _divide_by_root(step, means, total)

    def states(self) -> dict[str, Tensor]:
        return {name: tensor for p in self.parameters for name, tensor in p.states(self.device).items()}

    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        for one in self.parameters:
            one.load(states)


class _State:
    """CAME's state of a parameter; only matrices have instabilities."""

    def __init__(self, whole: WholeParameter) -> None:
        self.whole = whole
        self.momentum = torch.zeros_like(whole.owned.shard, requires_grad=False)
        self.squares = MeanSquares(whole, SQUARES)
        self.instabilities = MeanSquares(whole, INSTABILITIES) if whole.is_matrix else None

    def states(self, device: torch.device) -> dict[str, Tensor]:
        owned = self.whole.owned
        own = {f"{owned.name}.{MOMENTUM}": like_parameter(self.momentum, owned.parameter)}
        more = {} if self.instabilities is None else self.instabilities.states(device)
        return own | self.squares.states(device) | more

    def load(self, states: Mapping[str, Tensor]) -> None:
        self.momentum.copy_(local_part(states[f"{self.whole.owned.name}.{MOMENTUM}"]))
        self.squares.load(states)
        if self.instabilities is not None:
            self.instabilities.load(states)
