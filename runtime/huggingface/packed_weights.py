"""4-bit weights in blocks with a shared scale, the format in which gpt-oss is published.

MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6.1): an element is E2M1, and a byte holds two of them
with the first one in its lower half. 32 elements share a power of two, stored as E8M0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.huggingface.files import TensorPlace, read_tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of a matrix's two tensors."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of an E2M1 element by its lower three bits; the highest of its four bits is the sign."""

BIAS = 127
"""The bias of a block's exponent."""

BLOCK_BYTES = 16


class Packed(NamedTuple):
    """Matrices [E, O, I] of experts as stored: bytes [E, O, I / 32, 16] and exponents [E, O, I / 32]."""

    blocks: TensorPlace
    scales: TensorPlace

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices in the model, [E, I, O]."""
        *outer, outputs, groups, size = self.blocks.shape
        return *outer, groups * size * 2, outputs

    @property
    def is_whole(self) -> bool:
        """True if there is a scale for each block."""
        return self.scales.shape == self.blocks.shape[:-1] and self.blocks.shape[-1] == BLOCK_BYTES

    def read(self) -> Tensor:
        """The matrices [E, I, O] in bf16, which represents their values exactly."""
        return unpacked(read_tensor(self.blocks), read_tensor(self.scales)).mT.contiguous()


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values [..., I] in bf16, from bytes [..., I / 32, 16] and exponents [..., I / 32]."""
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
    # Both elements of a byte by one look-up.
    pairs = torch.stack((signed.repeat(16), signed.repeat_interleave(16)), dim=-1)
    found = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(found, scales.int().unsqueeze(-1) - BIAS).flatten(-2)


def packed_tensors(tensors: dict[str, TensorPlace]) -> dict[str, Packed]:
    """The packed matrices among `tensors`, under the names of the unpacked matrices."""
    return {
        name.removesuffix(BLOCKS): Packed(place, tensors[name.removesuffix(BLOCKS) + SCALES])
        for name, place in tensors.items()
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in tensors
    }
