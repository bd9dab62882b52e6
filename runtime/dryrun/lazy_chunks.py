"""Chunks of tensors for each of many ranks, of which a dry run makes those that are looked at.

FSDP2 and distributed tensors make the chunks of all ranks. These are views, which take no memory. But with a
thousand ranks they take much of a dry run's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor import Shard


class Chunks(Sequence[Tensor]):
    """The result of `torch.chunk`, or with `pad` as many chunks as asked for, the last ones empty."""

    def __init__(self, tensor: Tensor, chunks: int, dim: int = 0, pad: bool = False) -> None:
        self.tensor, self.dim = tensor, dim
        self.size = max(-(-tensor.size(dim) // chunks), 1)
        self.filled = max(-(-tensor.size(dim) // self.size), 1)
        self.number = chunks if pad else self.filled

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(self.number))]
        number = place + self.number if place < 0 else place
        if not 0 <= number < self.number:
            raise IndexError(place)
        if number >= self.filled:
            return self.tensor.new_empty(0)
        start = number * self.size
        return self.tensor.narrow(self.dim, start, min(self.size, self.tensor.size(self.dim) - start))

    @property
    def is_even(self) -> bool:
        """True if all chunks have the same size."""
        return self.number * self.size == self.tensor.size(self.dim)

    def joined(self, dim: int) -> Tensor:
        """Memory for the chunks in a row along `dim`, without their content; they are even."""
        sizes = list(self.tensor.shape)
        sizes[self.dim] = self.size
        sizes[dim] *= self.number
        return self.tensor.new_empty(sizes)


class _Torch:
    """PyTorch as FSDP2's collectives see it."""

    chunk = staticmethod(Chunks)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        """The result of `torch.cat`, of fake tensors."""
        if not (isinstance(tensors, Chunks) and tensors.is_even):
            return torch.cat(list(tensors), dim=dim, out=out)
        return tensors.joined(dim) if out is None else out


@contextmanager
def lazy_chunks() -> Iterator[None]:
    """Let FSDP2 and distributed tensors make chunks of fake tensors only where these are looked at."""
    with (
        patch.object(_fsdp_collectives, "torch", _Torch()),
        patch.object(_fsdp_param, "_chunk_with_empty", _padded),
        patch.object(Shard, "_select_split_tensor", _selecting(Shard._select_split_tensor)),
    ):
        yield


def _padded(tensor: Tensor, num_chunks: int, dim: int) -> Chunks:
    return Chunks(tensor, num_chunks, dim, pad=True)


def _selecting(select: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Shard._select_split_tensor`, which makes one chunk instead of all."""

    def selecting(self: Shard, tensor: Tensor, num_chunks: int, index: int, **flags: bool) -> Tensor:
        if type(self) is not Shard or flags.get("with_padding", True):
            return select(self, tensor, num_chunks, index, **flags)
        length = tensor.size(self.dim)
        size = -(-length // num_chunks)
        start = index * size
        if start >= length:
            return tensor.new_zeros([*tensor.shape[: self.dim], 0, *tensor.shape[self.dim + 1 :]])
        chunk = tensor.narrow(self.dim, start, min(size, length - start))
        if flags.get("clone", True):
            return chunk.clone()
        return chunk.contiguous() if flags.get("contiguous", True) else chunk

    return selecting
