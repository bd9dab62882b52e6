"""Means of squares over the rows and columns of a matrix that is split over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from runtime.optimizers.sharding import Groups, groups_of, sum_over
from runtime.optimizers.shards import ParameterShard
from runtime.parallel.local_tensors import like_parameter, local_part, split_dim

PADDED_NAMES = ("embedding.tokens.weight", "head.weight", "further_embedding.tokens.weight")
"""Parameters with padding rows after the vocabulary, whose number depends on the layout."""

Part = tuple[Tensor, Groups]
"""This rank's term of a sum, and the ranks that share the sum."""


class WholeParameter:
    """One parameter of this rank: the shape of the whole, and the ranks with the other parts."""

    def __init__(self, owned: ParameterShard, vocab: int) -> None:
        self.owned = owned
        parameter = owned.parameter
        shape = list(parameter.shape)
        if owned.name in PADDED_NAMES:
            shape[0] = vocab
        self.size = torch.Size(shape).numel()
        self.groups = groups_of(parameter, range(parameter.ndim))
        self.is_matrix = parameter.ndim > 1
        if self.is_matrix:
            self.rows, self.columns = shape[-2:]
            self.row_groups = groups_of(parameter, [parameter.ndim - 1])
            self.column_groups = groups_of(parameter, [parameter.ndim - 2])


class Slots(NamedTuple):
    """Names of means of squares in a checkpoint."""

    row: str
    column: str
    element: str
    """The name of the mean of a tensor that is not a matrix."""


class MeanSquares:
    """Running means of the squares of a tensor that is split like a parameter.

    The means of a shard [.., r, c] are [.., r, 1] and [.., 1, c]; a vector has a mean for each element.
    """

    def __init__(self, whole: WholeParameter, slots: Slots) -> None:
        self.whole = whole
        shard = whole.owned.shard.detach()
        last = whole.owned.parameter.ndim - 1
        if whole.is_matrix:
            self.row = shard.new_zeros(*shard.shape[:-1], 1)
            self.column = shard.new_zeros(*shard.shape[:-2], 1, shard.shape[-1])
            self._kept: list[tuple[str, Tensor, int | None]] = [
                (slots.row, self.row, last),
                (slots.column, self.column, last - 1),
            ]
        else:
            self.element = torch.zeros_like(shard)
            self._kept = [(slots.element, self.element, None)]

    def sums(self, values: Tensor) -> list[Part]:
        """Sums of the squares of `values` by row and by column; empty for a vector."""
        if not self.whole.is_matrix:
            return []
        return [
            (square_sum(values, -1), self.whole.row_groups),
            (square_sum(values, -2), self.whole.column_groups),
        ]

    def remember(self, values: Tensor, sums: Sequence[Tensor], weight: float, least: float = 0.0) -> None:
        """Update the means with the squares of `values`.

        Args:
            sums: results of `sums`, summed over all ranks.
            weight: weight of the new squares; the old means have the rest.
            least: term added to each square.
        """
        if not self.whole.is_matrix:
            self.element.lerp_(values.square().add_(least), weight)
            return
        by_row, by_column = sums
        self.row.lerp_((by_row / self.whole.columns).add_(least), weight)
        self.column.lerp_((by_column / self.whole.rows).add_(least), weight)

    def row_total(self) -> Part:
        """Sum of the means of this rank's rows; empty for a vector."""
        if not self.whole.is_matrix:
            return self.element.new_zeros(0), ()
        return self.row.sum(dim=-2, keepdim=True), self.whole.column_groups

    def states(self, device: torch.device) -> dict[str, Tensor]:
        """Means by `name.slot`; each is whole in the dimension over which it is taken."""
        owned = self.whole.owned
        return {
            f"{owned.name}.{slot}": _as_reduced(mean, owned.parameter, dim, device)
            for slot, mean, dim in self._kept
        }

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Load the means from tensors of the form of `states`."""
        for slot, mean, _ in self._kept:
            mean.copy_(local_part(states[f"{self.whole.owned.name}.{slot}"]))


def square_sum(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Sum of squares over a dimension, which is kept with size one, or over all."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None)
    return norm.square_()


def sums_of_each(parts: Sequence[Sequence[Part]], device: torch.device) -> list[list[Tensor]]:
    """Sums over ranks of the parts of each parameter, with one message for each way to split parameters."""
    sums = iter(sum_over([part for own in parts for part in own], device))
    return [[next(sums) for _ in own] for own in parts]


def root_mean_squares(
    parameters: Sequence[WholeParameter], tensors: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Root mean square of each whole tensor; `tensors` are this rank's parts."""
    parts = [(square_sum(tensor), p.groups) for p, tensor in zip(parameters, tensors, strict=True)]
    sums = sum_over(parts, device)
    return [(total / p.size).sqrt_() for p, total in zip(parameters, sums, strict=True)]


def _as_reduced(mean: Tensor, parameter: Tensor, dim: int | None, device: torch.device) -> Tensor:
    """`mean` as a distributed tensor split like `parameter`, except for the summed dimension `dim`."""
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
