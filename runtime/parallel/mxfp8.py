"""GEMMs in MXFP8 (one scale per 32 values), in operations that compilers can fuse.

Values are E4M3 in all three GEMMs of a layer, scales E8M0 and rounded up, as in training recipes for
Blackwell (arXiv:2506.08027, section 3): the largest value never exceeds the range. Each GEMM sums over the
values that share a scale, so matrices are cast once along rows and once along columns. The kernel is
cuBLAS's, through PyTorch; on a CPU fp32 GEMMs of the rounded operands stand in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from runtime.model.number_formats import MXFP8_BLOCK

LARGEST = 448.0
"""The largest finite E4M3 value."""

EXPONENT_BITS = 23
"""Bit position of the exponent in fp32; its bias is 127, as in E8M0."""

TILE_ROWS, TILE_BLOCKS = 128, 4
"""Scales that cuBLAS reads together (its documentation, "1D block scaling factors layout")."""


class Narrow(NamedTuple):
    """A matrix in 8 bits."""

    elements: Tensor
    """The elements, [R, K] in E4M3."""
    exponents: Tensor
    """Exponents, [R, K / 32] uint8; elements are multiplied by 2 to the power of these minus 127."""


def narrow(matrix_RK: Tensor) -> Narrow:
    """A matrix in 8 bits, cast along its rows."""
    blocks = matrix_RK.float().reshape(len(matrix_RK), -1, MXFP8_BLOCK)
    bits = (blocks.abs().amax(-1) / LARGEST).view(torch.int32)
    # Whatever is more than a power of two takes the next one.
    exponents = (bits + ((1 << EXPONENT_BITS) - 1)) >> EXPONENT_BITS
    # 2 to 127 minus the exponent, which no bf16 number takes out of range.
    inverse = ((254 - exponents) << EXPONENT_BITS).view(torch.float32)
    elements = (blocks * inverse.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return Narrow(elements, exponents.to(torch.uint8))


def wide(matrix: Narrow) -> Tensor:
    """The values of an 8-bit matrix in fp32."""
    blocks = matrix.elements.float().view(len(matrix.elements), -1, MXFP8_BLOCK)
    return torch.ldexp(blocks, matrix.exponents.int().unsqueeze(-1) - 127).flatten(-2)


def tiled(exponents_RB: Tensor) -> Tensor:
    """Scales in cuBLAS's order: tiles of 128 rows and 4 blocks, with the rows 0, 32, 64 and 96 first in each
    tile.

    Returns:
        all scales in one dimension, in E8M0, padded to whole tiles.
    """
    rows, blocks = exponents_RB.shape
    filled = F.pad(exponents_RB, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = filled.view(-1, 4, TILE_ROWS // 4, filled.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)


def _multiply(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """left [I, K] times the transpose of right [J, K]: [I, J]."""
    if left.elements.device.type != "cuda":
        return (wide(left) @ wide(right).t()).to(dtype)
    factors = tiled(left.exponents), tiled(right.exponents)
    result: Tensor = mxfp8_product(left.elements, right.elements.t(), *factors, dtype)
    return result


# PyTorch 2.11 compiles an operator of its own that takes E8M0 without heed of how operands lie in memory, and
# the kernel takes rows times columns alone. Operators of others get operands as in eager code.
@torch.library.custom_op("planner::mxfp8_product", mutates_args=())
def mxfp8_product(
    left_IK: Tensor, right_KJ: Tensor, left_factors: Tensor, right_factors: Tensor, dtype: torch.dtype
) -> Tensor:
    """The GEMM of two 8-bit matrices by a GPU kernel: [I, J]."""
    kind, layout = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    result: Tensor = F.scaled_mm(
        left_IK,
        right_KJ,
        left_factors,
        kind,
        right_factors,
        kind,
        swizzle_a=layout,
        swizzle_b=layout,
        output_dtype=dtype,
    )
    return result


@mxfp8_product.register_fake
def _(
    left_IK: Tensor, right_KJ: Tensor, left_factors: Tensor, right_factors: Tensor, dtype: torch.dtype
) -> Tensor:
    return left_IK.new_empty(len(left_IK), right_KJ.shape[1], dtype=dtype)


def _on_side(matrix_RK: Tensor) -> Narrow:
    """The transpose of a matrix, cast along its columns, and padded with zeros so that GEMMs can sum over its
    rows."""
    missing = -matrix_RK.shape[0] % MXFP8_BLOCK
    filled = F.pad(matrix_RK, (0, 0, 0, missing)) if missing else matrix_RK
    return narrow(filled.t().contiguous())


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """The differentiable GEMM: x [M, K], weight [N, K] -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        # Not in 8 bits: other layers keep the same activations, and compilers choose what is kept.
        ctx.save_for_backward(x_MK, weight_NK)
        return _multiply(narrow(x_MK), narrow(weight_NK), x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x_MK, weight_NK = ctx.saved_tensors
        dtype, of_x, of_weight = grad_MN.dtype, None, None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(narrow(grad_MN), _on_side(weight_NK), dtype)
        if ctx.needs_input_grad[1]:
            of_weight = _multiply(_on_side(grad_MN), _on_side(x_MK), dtype)
        return of_x, of_weight


def mxfp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in MXFP8; arguments are those of torch.nn.functional.linear."""
    # Views are made outside: compiled code may not write over results that are none.
    rows = _Product.apply(x.flatten(0, -2), weight)
    result: Tensor = rows.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias
