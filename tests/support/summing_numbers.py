"""Numbers of the kernels that add to sums, by Triton's interpreter.

`python -m tests.support.summing_numbers` prints, as JSON, the largest error of each case, relative to the sum
of the magnitudes that it is made of.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from collections.abc import Iterator
from itertools import product

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from runtime.parallel import summing_kernels as kernels
from runtime.parallel.summing_kernels import Tiles

SMALL = Tiles(32, 64, 16, 4, 1, 4)
"""Tiles of which small matrices have several."""

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag for memory that need not be there; named since Python 3.13."""

NARROW = torch.float8_e5m2, torch.float8_e4m3fn


def main() -> None:
    print(json.dumps(dict([*grouped_errors(), *scaled_errors(), far_error()])))


def grouped_errors() -> Iterator[tuple[str, float]]:
    """Groups of any number of rows; fp16 stands for bf16, of which NumPy has none."""
    draw = random.Random(1)
    counts = [
        [0],
        [1],
        [0, 0, 17, 1, 0, 64, 3],
        [0, 40],
        [130, 0, 0],
        *([draw.randrange(60)] * 3 for _ in "ab"),
    ]
    cases = [*product(enumerate(counts), [(16, 8), (40, 72)], [SMALL])]
    cases += product([(2, counts[2]), (4, counts[4])], [(136, 264)], kernels.GROUPED_TILES)
    for (number, each), (outer, inner), tiles in cases:
        yield f"grouped {each} {outer} x {inner} {tiles}", grouped_error(each, outer, inner, tiles, number)


def grouped_error(counts: list[int], outer: int, inner: int, tiles: Tiles, number: int) -> float:
    left, right = (normal(sum(counts) + 2, width).half() for width in (outer, inner))
    if number % 3 == 1:
        left = left.t().contiguous().t()
    if number % 3 == 2:
        # Rows begin at any place.
        wide = normal(*left.shape).half().new_empty(left.shape[0], outer + 3)
        wide[:, 3:] = left
        left = wide[:, 3:]
    left[sum(counts) :] = torch.nan
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    # As a part of a buffer for all parameters of a layer.
    buffer = torch.full((len(counts) * outer * inner + 5,), torch.nan)
    total = buffer[5:].view(len(counts), outer, inner)
    if number % 2:
        total = buffer[5:].view(len(counts), inner, outer).transpose(1, 2)
    parts = [part.split([*counts, 2])[:-1] for part in (left.double(), right.double())]
    expected = torch.stack([a.t() @ b for a, b in zip(*parts, strict=True)])
    size = torch.stack([a.abs().t() @ b.abs() for a, b in zip(*parts, strict=True)])
    worst = 0.0
    for times in (1, 2):
        kernels.add_grouped(total, times == 2, left, right, ends, tiles)
        worst = max(worst, relative(total, times * expected, size))
    assert buffer[:5].isnan().all()
    return worst


def scaled_errors() -> Iterator[tuple[str, float]]:
    for outer, inner, rows in ((16, 32, 16), (48, 80, 144), (272, 144, 80), (144, 16, 272)):
        for tiles in (SMALL._replace(inner=32), *kernels.SCALED_TILES):
            left, right = (
                normal(side, rows).to(dtype) for side, dtype in zip((outer, inner), NARROW, strict=True)
            )
            # Scales of the smallest gradients and inputs there are: their product is about 1e31.
            scales = torch.tensor(5.7e16), torch.tensor(4.4e14)
            factor = 1 / (scales[0].double() * scales[1].double())
            total = torch.full((outer, inner), torch.nan)
            expected = left.double() @ right.double().t() * factor
            size = left.double().abs() @ right.double().abs().t() * factor
            worst = 0.0
            for times in (1, 2):
                kernels.add_scaled(total, times == 2, left, right, scales, tiles)
                worst = max(worst, relative(total, times * expected, size))
            yield f"scaled {outer} x {inner} of {rows} {tiles}", worst


def far_error() -> tuple[str, float]:
    """Rows whose offsets exceed 32 bits, in memory that is never filled."""
    step, rows = 2**27, 20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, 2 * step * rows, flags=flags)
    left = torch.frombuffer(memory, dtype=torch.half).as_strided((rows, 16), (step, 1))
    left.copy_(normal(rows, 16))
    right, ends = normal(rows, 16).half(), torch.tensor([17, rows], dtype=torch.int32)
    total = torch.full((2, 16, 16), torch.nan)
    kernels.add_grouped(total, False, left, right, ends, SMALL)
    parts = [part.double().split([17, rows - 17]) for part in (left, right)]
    expected = torch.stack([a.t() @ b for a, b in zip(*parts, strict=True)])
    return "far", relative(total, expected, expected.abs().clamp(min=1.0))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative(found: Tensor, expected: Tensor, size: Tensor) -> float:
    if not found.isfinite().all():
        return float("inf")
    return float(((found.double() - expected).abs() / size.clamp(min=1e-300)).max())


if __name__ == "__main__":
    main()
