"""Adafactor (arXiv:1804.04235) on shards, as torch.optim.Adafactor on whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from runtime.optimizers.sharding import Groups, groups_of, sum_over
from runtime.optimizers.shards import ParameterShard
from runtime.parallel.local_tensors import like_parameter, local_part, split_dim

BETA2_DECAY = -0.8
"""Step t keeps 1 - t^-0.8 of the second moments (section 7.2)."""

LEAST_ROOT_SQUARE = torch.finfo(torch.float32).eps
"""Below it a second moment counts as its square (PyTorch's eps1)."""

LEAST_RMS = 1e-3
"""Smallest size of a parameter that steps are relative to (section 8)."""

LARGEST_RMS = 1.0
"""Largest root mean square of an update (section 6)."""

PADDED_NAMES = ("embedding.tokens.weight", "head.weight", "further_embedding.tokens.weight")
"""Parameters whose rows beyond the vocabulary are padding, more or less of it with the layout."""


class FactoredMoments:
    """One parameter, and the means of its squared gradients over rows and over columns.

    Those of a shard [.., r, c] are [.., r, 1] and [.., 1, c]; a vector has a mean for each element.
    """

    def __init__(self, owned: ParameterShard, vocab: int) -> None:
        self.owned = owned
        shape = list(owned.parameter.shape)
        if owned.name in PADDED_NAMES:
            shape[0] = vocab
        shard, parameter = owned.shard.detach(), owned.parameter
        self.size = torch.Size(shape).numel()
        self.groups = groups_of(parameter, range(parameter.ndim))
        self.is_matrix = parameter.ndim > 1
        if self.is_matrix:
            last = parameter.ndim - 1
            self.rows, self.columns = shape[-2:]
            self.row_groups = groups_of(parameter, [last])
            self.column_groups = groups_of(parameter, [last - 1])
            self.moments = {
                "row_var": shard.new_zeros(*shard.shape[:-1], 1),
                "col_var": shard.new_zeros(*shard.shape[:-2], 1, shard.shape[-1]),
            }
        else:
            self.moments = {"variance": torch.zeros_like(shard)}

    def sums(self, gradient: Tensor) -> list[tuple[Tensor, Groups]]:
        """Squares of the weights, and those of the gradients by row and by column."""
        parts = [(square_sum(self.owned.shard), self.groups)]
        if self.is_matrix:
            parts.append((square_sum(gradient, -1), self.row_groups))
            parts.append((square_sum(gradient, -2), self.column_groups))
        return parts

    def remember(self, gradient: Tensor, sums: Sequence[Tensor], weight: float) -> None:
        """Take new squares into the means."""
        if not self.is_matrix:
            self.moments["variance"].lerp_(gradient.square(), weight)
            return
        by_row, by_column = sums
        self.moments["row_var"].lerp_(by_row / self.columns, weight)
        self.moments["col_var"].lerp_(by_column / self.rows, weight)

    def row_total(self) -> tuple[Tensor, Groups]:
        """Sum of the means of this rank's rows."""
        if not self.is_matrix:
            return self.owned.shard.new_zeros(0), ()
        return self.moments["row_var"].sum(dim=-2, keepdim=True), self.column_groups

    def normalise(self, gradient: Tensor, row_total: Tensor) -> None:
        """Divide the gradient by the root of its estimated second moment (algorithm 4)."""
        if self.is_matrix:
            mean = (row_total / self.rows).clamp_(min=LEAST_ROOT_SQUARE)
            estimate = (self.moments["row_var"] @ self.moments["col_var"]).div_(mean)
        else:
            estimate = self.moments["variance"].clone()
        gradient.mul_(estimate.clamp_(min=LEAST_ROOT_SQUARE**2).rsqrt_())

    def states(self, device: torch.device) -> dict[str, Tensor]:
        """Means as `name.slot`; whole in the dimension that they are taken over."""
        parameter = self.owned.parameter
        dims = {"row_var": parameter.ndim - 1, "col_var": parameter.ndim - 2, "variance": None}
        return {
            f"{self.owned.name}.{slot}": _as_reduced(mean, parameter, dims[slot], device)
            for slot, mean in self.moments.items()
        }


def square_sum(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Sum of squares over a dimension, which stays with size one, or over all."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None)
    return norm.square_()


class Adafactor:
    """Adafactor without momentum, with the settings that PyTorch has when none are given.

    Ranks that share a parameter exchange sums only: one number for each row and column, and two for the
    parameter, in three messages for each way to split parameters. Means of rows and columns are kept by those
    who hold the rows and columns.
    """

    slots: tuple[str, ...] = ("row_var", "col_var", "variance")

    def __init__(self, owned: Sequence[ParameterShard], vocab: int, device: torch.device) -> None:
        self.parameters = [FactoredMoments(one, vocab) for one in owned]
        self.device = device
        self.updates = 0

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        self.updates += 1
        pairs = [(p, p.owned.shard.grad) for p in self.parameters if p.owned.shard.grad is not None]
        gradients = [gradient for _, gradient in pairs if gradient is not None]
        parameters = [parameter for parameter, _ in pairs]
        parts = [p.sums(gradient) for p, gradient in zip(parameters, gradients, strict=True)]
        sums = iter(sum_over([part for own in parts for part in own], self.device))
        weights = []
        for parameter, gradient, own in zip(parameters, gradients, parts, strict=True):
            weights.append(next(sums))
            parameter.remember(gradient, [next(sums) for _ in own[1:]], self.updates**BETA2_DECAY)
        totals = sum_over([p.row_total() for p in parameters], self.device)
        for parameter, gradient, total in zip(parameters, gradients, totals, strict=True):
            parameter.normalise(gradient, total)
        sizes = sum_over(
            [(square_sum(g), p.groups) for p, g in zip(parameters, gradients, strict=True)], self.device
        )
        relative = min(learning_rate, self.updates**-0.5)
        for parameter, update, weight, size in zip(parameters, gradients, weights, sizes, strict=True):
            rate = (weight / parameter.size).sqrt_().clamp_(min=LEAST_RMS) * relative
            excess = ((size / parameter.size).sqrt_() / LARGEST_RMS).clamp_(min=1.0)
            if parameter.owned.decayed:
                parameter.owned.shard.mul_(1.0 - learning_rate * weight_decay)
            parameter.owned.shard.sub_(update.mul_(rate / excess))

    def states(self) -> dict[str, Tensor]:
        return {name: mean for p in self.parameters for name, mean in p.states(self.device).items()}

    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        for parameter in self.parameters:
            for slot, mean in parameter.moments.items():
                mean.copy_(local_part(states[f"{parameter.owned.name}.{slot}"]))


def _as_reduced(mean: Tensor, parameter: Tensor, dim: int | None, device: torch.device) -> Tensor:
    """`mean` as a distributed tensor split as `parameter`, but for `dim`, which has been summed over."""
    if not isinstance(parameter, DTensor):
        return mean
    if dim is None:
        return like_parameter(mean, parameter)
    shape = [1 if number == dim else length for number, length in enumerate(parameter.shape)]
    return DTensor.from_local(
        mean.to(device),
        parameter.device_mesh,
        [Replicate() if split_dim(place) == dim else place for place in parameter.placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
