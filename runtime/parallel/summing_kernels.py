"""Triton kernels of weight-gradient GEMMs that add to sums in fp32: of experts, and of operands in 8 bits.

PyTorch's kernels for these products write a result of their own. Triton comes with PyTorch's builds for CUDA,
so this module is imported only where a device of that kind computes (`runtime.parallel.summing_products`).

Operands may have any strides below 2^24 elements; offsets of tiles are 64-bit numbers. Loads are wide where
the dimension that is dense begins at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiles(NamedTuple):
    """The sizes of a kernel's tiles, and how it computes one."""

    rows: int
    """Rows of the result."""
    columns: int
    """Columns of the result."""
    inner: int
    """Elements that are summed over at a time."""
    warps: int
    stages: int
    """Tiles of operands in flight."""
    parts: int
    """Parts of a tile that are added one after the other."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a kernel by name."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "INNER": self.inner,
            "STRIPE": STRIPE,
            "PARTS": self.parts,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


STRIPE = 8
"""Rows of tiles that are computed together, so that they find their operands in the cache."""

GROUPED_TILES = (Tiles(128, 128, 64, 8, 3, 2), Tiles(128, 256, 64, 8, 3, 4))
"""Tiles for operands in 16 bits, the smaller first. Hopper's multiprocessors have two of the smaller one at a
time: sums of the one move while the other one multiplies."""

SCALED_TILES = (Tiles(128, 128, 128, 8, 3, 2), Tiles(256, 128, 64, 8, 4, 8))
"""Tiles for operands in 8 bits, the smaller first. The larger one reads fewer bytes for each product."""

LARGE_SINCE = 9
"""The major compute capability from which the larger tiles have enough memory and registers."""


def tiles_for(every: tuple[Tiles, ...], major: int) -> tuple[Tiles, ...]:
    """The tiles to try on a device of a major compute capability."""
    return every if major >= LARGE_SINCE else every[:1]


def add_grouped(
    sum_ENK: Tensor, holds: bool, left_RN: Tensor, right_RK: Tensor, ends_E: Tensor, tiles: Tiles
) -> None:
    """Add the products of the rows of each group to its sum in fp32; or write them, if it holds none yet."""
    groups, rows, columns = sum_ENK.shape
    places = -(-rows // tiles.rows) * -(-columns // tiles.columns)
    with torch.cuda.device_of(sum_ENK):
        grouped_kernel[(groups * places,)](
            left_RN,
            right_RK,
            ends_E,
            sum_ENK,
            int(holds),
            rows,
            columns,
            *left_RN.stride(),
            *right_RK.stride(),
            *sum_ENK.stride(),
            **tiles.options,
        )


def add_scaled(
    sum_NK: Tensor,
    holds: bool,
    left_NM: Tensor,
    right_KM: Tensor,
    scales: tuple[Tensor, Tensor],
    tiles: Tiles,
) -> None:
    """Add left times the transpose of right, divided by the scales of both, to a sum in fp32; or write it if
    nothing is there yet."""
    rows, columns = sum_NK.shape
    places = -(-rows // tiles.rows) * -(-columns // tiles.columns)
    with torch.cuda.device_of(sum_NK):
        scaled_kernel[(places,)](
            left_NM,
            right_KM,
            *scales,
            sum_NK,
            int(holds),
            rows,
            columns,
            left_NM.shape[1],
            *left_NM.stride(),
            *right_KM.stride(),
            *sum_NK.stride(),
            **tiles.options,
        )


@triton.jit
def _tile(number, tiles_down, tiles_across, STRIPE: tl.constexpr):
    """The row and column of a tile, which go through stripes of the result column by column."""
    in_stripe = STRIPE * tiles_across
    first = number // in_stripe * STRIPE
    height = tl.minimum(tiles_down - first, STRIPE)
    within = number % in_stripe
    return first + within % height, within // height


@triton.jit
def _add(total, sums, holds, first_n, first_k, N, K, sum_n, sum_k, PARTS: tl.constexpr):
    """Add a tile, whose first row and column are given, to its part of a sum; or write it there if nothing is
    there yet.

    It goes by parts of the columns, as all elements would take more registers than there are.
    """
    if PARTS > 1:
        halves = total.reshape(total.shape[0], 2, total.shape[1] // 2).permute(0, 2, 1).split()
        _add(halves[0], sums, holds, first_n, first_k, N, K, sum_n, sum_k, PARTS // 2)
        first_k += total.shape[1] // 2
        _add(halves[1], sums, holds, first_n, first_k, N, K, sum_n, sum_k, PARTS // 2)
    else:
        at_n, at_k = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
        places = sums + first_n.to(tl.int64) * sum_n + first_k.to(tl.int64) * sum_k
        places += at_n[:, None] * sum_n + at_k[None, :] * sum_k
        inside = (first_n + at_n < N)[:, None] & (first_k + at_k < K)[None, :]
        # Memory without a gradient may hold no number, and is not read.
        earlier = tl.load(places, mask=inside & (holds != 0), other=0.0)
        tl.store(places, earlier + total, mask=inside)


@triton.jit(do_not_specialize=["holds"])
def grouped_kernel(
    left,
    right,
    ends,
    sums,
    holds,
    N,
    K,
    left_r,
    left_n,
    right_r,
    right_k,
    sum_e,
    sum_n,
    sum_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add left[r, n] right[r, k], summed over the rows r of each group, to sums[group, n, k]."""
    tiles_down, tiles_across = tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS)
    tiles = tiles_down * tiles_across
    group = tl.program_id(0) // tiles
    down, across = _tile(tl.program_id(0) % tiles, tiles_down, tiles_across, STRIPE)
    first_n, first_k = down * ROWS, across * COLUMNS
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    # The sum of a group without rows stays as it is.
    if (end > begin) | (holds == 0):
        at_n, at_k, at_r = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INNER)
        lefts = left + begin.to(tl.int64) * left_r + first_n.to(tl.int64) * left_n
        rights = right + begin.to(tl.int64) * right_r + first_k.to(tl.int64) * right_k
        is_n, is_k = (first_n + at_n < N)[None, :], (first_k + at_k < K)[None, :]
        from_left = at_r[:, None] * left_r + at_n[None, :] * left_n
        from_right = at_r[:, None] * right_r + at_k[None, :] * right_k
        total, inner = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.full((), INNER, tl.int64)
        for first in range(begin, end, INNER):
            # Rows after the last one are those of other groups.
            is_own = (first + at_r < end)[:, None]
            left_RN = tl.load(lefts + from_left, mask=is_own & is_n, other=0.0)
            right_RK = tl.load(rights + from_right, mask=is_own & is_k, other=0.0)
            total = tl.dot(tl.trans(left_RN), right_RK, total)
            lefts += inner * left_r
            rights += inner * right_r
        own = sums + group.to(tl.int64) * sum_e
        _add(total, own, holds, first_n, first_k, N, K, sum_n, sum_k, PARTS)


@triton.jit(do_not_specialize=["holds"])
def scaled_kernel(
    left,
    right,
    left_scale,
    right_scale,
    sums,
    holds,
    N,
    K,
    M,
    left_n,
    left_m,
    right_k,
    right_m,
    sum_n,
    sum_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add left[n, m] right[k, m], summed over m and divided by both scales, to sums[n, k]."""
    down, across = _tile(tl.program_id(0), tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS), STRIPE)
    first_n, first_k = down * ROWS, across * COLUMNS
    at_n, at_k, at_m = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    lefts = left + first_n.to(tl.int64) * left_n
    rights = right + first_k.to(tl.int64) * right_k
    is_n, is_k = (first_n + at_n < N)[:, None], (first_k + at_k < K)[None, :]
    from_left = at_n[:, None] * left_n + at_m[None, :] * left_m
    from_right = at_m[:, None] * right_m + at_k[None, :] * right_k
    total, inner = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.full((), INNER, tl.int64)
    for first in range(0, M, INNER):
        inside = first + at_m < M
        left_NM = tl.load(lefts + from_left, mask=is_n & inside[None, :], other=0.0)
        right_MK = tl.load(rights + from_right, mask=inside[:, None] & is_k, other=0.0)
        # Hopper's tensor cores add fewer bits than fp32 has: sums of a tile are added outside of them.
        total = tl.dot(left_NM, right_MK, total, max_num_imprecise_acc=INNER)
        lefts += inner * left_m
        rights += inner * right_m
    # By one scale after the other, as their product may have no place in fp32.
    total = total / tl.load(left_scale) / tl.load(right_scale)
    _add(total, sums, holds, first_n, first_k, N, K, sum_n, sum_k, PARTS)
