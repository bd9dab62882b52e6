"""Conversion of a parameter's shards to whole matrices and back; sums over the ranks of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.parallel.collectives import gather
from runtime.parallel.local_tensors import split_dim

Groups = tuple[dist.ProcessGroup, ...]


def groups_of(parameter: Tensor, dims: Sequence[int]) -> Groups:
    """Groups of ranks over which the dimensions `dims` of a parameter are split."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(number)
        for number, place in enumerate(parameter.placements)
        if split_dim(place) in dims and mesh.size(number) > 1
    )


@dataclass(frozen=True)
class _Split:
    """A dimension of a mesh that splits a dimension of a tensor."""

    dim: int
    length: int
    """The length of the tensor before the split."""
    size: int
    index: int
    """This rank's number among `size` ranks."""
    group: dist.ProcessGroup

    @property
    def step(self) -> int:
        """Length of a part; the last ones may be shorter, or empty."""
        return -(-self.length // self.size)

    @property
    def start(self) -> int:
        """Index at which this rank's part begins."""
        return min(self.index * self.step, self.length)

    @property
    def own_length(self) -> int:
        """The length of this rank's part."""
        return min(self.step, self.length - self.start)

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's part."""
        return tensor.narrow(self.dim, self.start, self.own_length)

    def join(self, part: Tensor) -> Tensor:
        """The whole tensor from the parts of all ranks."""
        shape = list(part.shape)
        shape[self.dim] = self.step
        padded = part.new_zeros(shape)
        padded.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        return gather(padded, self.dim, self.group).narrow(self.dim, 0, self.length)


def _matrix_splits(parameter: Tensor) -> list[_Split]:
    """Splits of the last two dimensions of a parameter, in the order of splitting."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, own = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
    inner = (parameter.ndim - 2, parameter.ndim - 1)
    places = [(number, place) for number, place in enumerate(parameter.placements) if mesh.size(number) > 1]
    splits: list[_Split] = []
    lengths = list(parameter.shape)
    # FSDP2 splits what tensor parallelism has left: a "strided" shard, on an earlier dimension of the mesh.
    for number, place in sorted(places, key=lambda item: hasattr(item[1], "split_factor")):
        dim = split_dim(place)
        if dim is not None and dim in inner:
            split = _Split(dim, lengths[dim], mesh.size(number), own[number], mesh.get_group(number))
            lengths[dim] = split.own_length
            splits.append(split)
    return splits


def whole_matrices(local: Tensor, parameter: Tensor) -> Tensor:
    """The whole matrices of which this rank has a part.

    Only splits of the last two dimensions are gathered, so ranks with other experts of a stack [E, R, C] send
    nothing.

    Args:
        local: a part on the device of the mesh, of any number format, split like `parameter`.

    Returns:
        [.., R, C], whole in the last two dimensions.
    """
    for split in reversed(_matrix_splits(parameter)):
        local = split.join(local)
    return local


def local_matrices(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of the result of `whole_matrices` for `parameter`: a view, [.., r, c]."""
    for split in _matrix_splits(parameter):
        whole = split.cut(whole)
    return whole


def sum_over(parts: Sequence[tuple[Tensor, Groups]], device: torch.device) -> list[Tensor]:
    """Sums of small tensors, each over its groups of ranks, with one message for each distinct set of groups.

    Args:
        parts: this rank's terms, of one number format.
        device: device of the groups' communication; the sums are on the device of the terms.
    """
    sums = [part for part, _ in parts]
    for groups in dict.fromkeys(groups for _, groups in parts if groups):
        members = [number for number, (_, own) in enumerate(parts) if own == groups]
        flat = torch.cat([sums[number].flatten() for number in members]).to(device)
        for group in groups:
            dist.all_reduce(flat, group=group)
        pieces = torch.split(flat, [sums[number].numel() for number in members])
        for number, piece in zip(members, pieces, strict=True):
            sums[number] = piece.view_as(sums[number]).to(sums[number].device)
    return sums
