"""Frozen matrices in 4 bits: NF4 with scales in 8 bits (QLoRA, arXiv:2305.14314, section 3).

It uses plain PyTorch operators, on any device. Each output's weights are in blocks of 64 inputs; the scale of
a block is its largest magnitude. The scales of the same 64 inputs of 256 outputs are stored as 255ths of
their largest one. No block has weights of two outputs, so ranks can split a matrix without changing its
values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from costmodels.layers.quantised import BLOCK, GROUP

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""Values of the 16 codes before scales: quantiles of a normal distribution (appendix E)."""

STEPS = 255
"""Largest code of a scale."""

TINY = torch.finfo(torch.float32).tiny
"""The scale of blocks of zeros."""


class NF4Weight(nn.Module):
    """A frozen 4-bit matrix [O, I], or its rows from `first_row` on.

    Args:
        outputs: O, the number of rows here.
        inputs: I.
        dtype: format of GEMMs.
        first_row: number of the matrix's rows before these.
        device: the default one unless given.
    """

    codes: Tensor
    """Two weights per byte, the first one in the upper bits, [O, blocks x 32]."""
    scales: Tensor
    """Codes of scales, [O, blocks]."""
    factors: Tensor
    """Largest scale of each group with rows here, fp32 [groups, blocks]."""
    pairs: Tensor
    """The values of both weights of each byte, before scaling, [256, 2]."""

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        first_row: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        blocks = -(-inputs // BLOCK)
        self.outputs, self.inputs, self.first_row = outputs, inputs, first_row
        self.first_group = first_row // GROUP
        groups = -(-(first_row + outputs) // GROUP) - self.first_group
        for name, shape, stored in (
            ("codes", (outputs, blocks * BLOCK // 2), torch.uint8),
            ("scales", (outputs, blocks), torch.uint8),
            ("factors", (groups, blocks), torch.float32),
            ("pairs", (256, 2), dtype),
        ):
            empty = torch.empty(shape, dtype=stored, device=device)
            self.register_buffer(name, empty, persistent=False)

    @torch.no_grad()
    def fill(self, weight_OI: Tensor, whole: Callable[[Tensor], Tensor] = lambda factors: factors) -> None:
        """Quantise `weight_OI` into this matrix.

        Args:
            whole: makes the groups' largest scales over all rows from those of the rows here.
        """
        wide = F.pad(weight_OI.float(), (0, self.scales.shape[1] * BLOCK - self.inputs))
        blocks = wide.view(self.outputs, -1, BLOCK)
        largest = blocks.abs().amax(-1)
        front = self.first_row - self.first_group * GROUP
        back = len(self.factors) * GROUP - front - self.outputs
        grouped = F.pad(largest, (0, 0, front, back)).view(len(self.factors), GROUP, -1)
        self.factors.copy_(whole(grouped.amax(1)))
        self.scales.copy_((largest / self._by_row(self.factors).clamp(min=TINY) * STEPS).round())
        relative = blocks / self._own_scales().clamp(min=TINY).unsqueeze(-1)
        levels = torch.tensor(LEVELS, device=relative.device)
        nearest = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True)
        both = nearest.view(self.outputs, -1, 2)
        self.codes.copy_(both[..., 0] * len(LEVELS) + both[..., 1])
        self.pairs.copy_(torch.cartesian_prod(levels, levels))

    def _by_row(self, grouped: Tensor) -> Tensor:
        """Entries of [groups, blocks] for each row of this shard."""
        front = self.first_row - self.first_group * GROUP
        every = grouped.unsqueeze(1).expand(-1, GROUP, -1).flatten(0, 1)
        return every[front : front + self.outputs]

    def _own_scales(self) -> Tensor:
        """Scales in fp32, [O, blocks]."""
        return self.scales * self._by_row(self.factors / STEPS)

    def dense(self) -> Tensor:
        """The dequantised matrix [O, I], in the format of GEMMs."""
        found = F.embedding(self.codes.int(), self.pairs)
        blocks = found.view(self.outputs, -1, BLOCK).mul_(self._own_scales().unsqueeze(-1))
        return blocks.view(self.outputs, -1)[:, : self.inputs]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The GEMM with this matrix: [.., I] -> [.., O]."""
        return F.linear(x, self.dense(), bias)


class _Product(torch.autograd.Function):
    """A GEMM that keeps no tensor: backward dequantises the matrix again, for the input gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: NF4Weight, bias: Tensor | None
    ) -> Tensor:  # type: ignore[override]
        ctx.weight = weight  # type: ignore[attr-defined]
        return weight.multiply(x, bias)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight: NF4Weight = ctx.weight  # type: ignore[attr-defined]
        return gradient @ weight.dense(), None, None


def nf4_linear(x: Tensor, weight: NF4Weight, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear with a frozen 4-bit matrix and a frozen bias."""
    if torch.compiler.is_compiling():
        # A compiler takes the matrix in backward for that of forward, and keeps it, unless it is told not to.
        again: Tensor = checkpoint(weight.multiply, x, bias, use_reentrant=False, preserve_rng_state=False)
        return again
    result: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def rounded(weight_OI: Tensor) -> Tensor:
    """Values of `weight_OI` after rounding to 4 bits, in fp32."""
    outputs, inputs = weight_OI.shape
    stored = NF4Weight(outputs, inputs, torch.float32, device=weight_OI.device)
    stored.fill(weight_OI)
    return stored.dense()
