"""Trials, at the start of a job, of the kernels that add weight gradients to sums (`summing_products`).

Kernels are used if they are right, and no slower than a GEMM and an addition of its result. Otherwise
gradients are added by operations of their own, with one log line that says why. Each rank decides by its own
device. Ranks that sum a gradient take it from either way, and all get the same result.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from runtime.logs.console import say
from runtime.model.number_formats import FLOAT8_SIDES
from runtime.parallel.summing_products import (
    GROUPED,
    SCALED,
    add_grouped_product,
    add_scaled_product,
    chosen,
)

WORDS = {GROUPED: "GEMMs of experts", SCALED: "GEMMs in 8 bits"}

RUNS, TIMES = 3, 5
"""Runs that are timed together, and how often they are. The median counts, without a first time before."""

MOST_GROUPS = 16
"""Experts of a trial. More take memory, but no other time for each."""

SMALL = (5, 0, 144, 1, 0, 64), 136, 272
"""Rows of each expert, and sides of their weights, of the trial of results: no multiples of a tile."""


class Sizes(NamedTuple):
    """The sizes of a product with a sum."""

    groups: int
    outer: int
    """Rows of a weight."""
    inner: int
    """Columns of a weight."""
    rows: int
    """Rows of gradients that are summed over, of all groups."""


class Contest(NamedTuple):
    """A product with its sum, by a kernel and by operations of their own."""

    summing: Callable[[Any], None]
    """Adds the product to the sum, by a kernel with the given tiles."""
    apart: Callable[[], None]
    """Adds the product to the sum by a GEMM and an addition."""


@cache
def adds_in_kernel(kind: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> bool:
    """Return whether the kernel of a kind of products is used on a device, for sizes of the job.

    A GPU is tried once, with one log line if it is not used. A CPU has no such kernel.
    """
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        return True  # A dry run, which counts memory for either way (`runtime.dryrun.tracker`).
    try:
        fault = fault_of(kind, device, dtype, sizes)
    except Exception as error:
        # Triton's errors have no class in common, and none may end a job that can do without.
        fault = str(error).strip().partition("\n")[0] or type(error).__name__
    if fault and not (dist.is_initialized() and dist.get_rank()):
        say(f"note: {WORDS[kind]} do not add weight gradients to their sums here ({fault})", sys.stderr)
    return not fault


def fault_of(kind: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str:
    """The reason why a kernel is not used; "" where it is, with the fastest of its tiles."""
    if torch.version.hip is not None:
        return "its kernels are NVIDIA's"
    from runtime.parallel import summing_kernels as kernels

    every = kernels.GROUPED_TILES if kind == GROUPED else kernels.SCALED_TILES
    major, _ = torch.cuda.get_device_capability(device)
    times: dict[Any, float] = {}
    failures: list[Exception] = []
    contest = contest_of(kind, device, dtype, sizes)
    for tiles in kernels.tiles_for(every, major):
        try:
            if is_right(kind, device, dtype, tiles):
                times[tiles] = seconds(partial(contest.summing, tiles), device)
        except Exception as error:
            # Other tiles may fit where these do not.
            failures.append(error)
    if not times:
        if failures:
            raise failures[0]
        return "other values"
    apart = seconds(contest.apart, device)
    # The memory of the trial is none of the job's.
    del contest
    torch.cuda.empty_cache()
    tiles = min(times, key=times.__getitem__)
    chosen[kind] = tiles
    if times[tiles] <= apart:
        return ""
    return f"{1e3 * times[tiles]:.2f} ms, beside {1e3 * apart:.2f} ms with additions of their own"


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of a GPU for one run."""
    found: list[float] = []
    with torch.cuda.device(device):
        for number in range(-1, TIMES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(RUNS):
                run()
            end.record()
            end.synchronize()
            if number >= 0:
                found.append(1e-3 * begin.elapsed_time(end) / RUNS)
    return statistics.median(found)


def is_right(kind: str, device: torch.device, dtype: torch.dtype, tiles: Any = None) -> bool:
    """Return whether two products of small whole numbers, which are exact, become the right sum."""
    counts, outer, inner = SMALL
    draw = torch.Generator().manual_seed(1)
    rows = sum(counts) if kind == GROUPED else max(counts)
    left, right = (torch.randint(-2, 3, (rows, width), generator=draw).float() for width in (outer, inner))
    if kind == GROUPED:
        parts = zip(torch.split(left, list(counts)), torch.split(right, list(counts)), strict=True)
        expected = torch.stack([one.t() @ other for one, other in parts])
        # Rows of no expert follow, which are no numbers.
        left, right = (F.pad(one, (0, 0, 0, 3), value=torch.nan).to(device, dtype) for one in (left, right))
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
    else:
        expected = left.t() @ right / 2.0
        scales = torch.tensor(0.5, device=device), torch.tensor(4.0, device=device)
        left, right = _in_8_bits(left, right, device)
    total = torch.full(expected.shape, torch.nan, device=device)
    for holds in (False, True):
        if kind == GROUPED:
            add_grouped_product(total, holds, left, right, ends, tiles)
        else:
            add_scaled_product(total, holds, left, right, scales, dtype, tiles)
    return torch.equal(total.cpu(), 2 * expected)


def contest_of(kind: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Contest:
    """A product of the sizes of a job, with a sum that holds gradients."""
    draw = torch.Generator(device).manual_seed(1)
    groups = min(sizes.groups, MOST_GROUPS)
    each = max(1, sizes.rows // sizes.groups)
    if kind == SCALED:
        each = -(-each // FLOAT8_SIDES) * FLOAT8_SIDES
    left, right = (
        torch.randn(groups * each, width, device=device, dtype=dtype, generator=draw)
        for width in (sizes.outer, sizes.inner)
    )
    if kind == GROUPED:
        total = torch.zeros(groups, sizes.outer, sizes.inner, device=device)
        ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * each

        def grouped_apart() -> None:
            torch._foreach_add_([total], [F.grouped_mm(left.t(), right, offs=ends)])

        return Contest(
            lambda tiles: add_grouped_product(total, True, left, right, ends, tiles), grouped_apart
        )
    from runtime.parallel.float8_tensorwise import Narrow, multiply_narrow

    total, one = torch.zeros(sizes.outer, sizes.inner, device=device), torch.ones((), device=device)
    gradient, x = _in_8_bits(left, right, device)

    def scaled_apart() -> None:
        product = multiply_narrow(Narrow(gradient, one, one), Narrow(x, one, one), dtype, fast=False)
        torch._foreach_add_([total], [product])

    return Contest(
        lambda tiles: add_scaled_product(total, True, gradient, x, (one, one), dtype, tiles), scaled_apart
    )


def _in_8_bits(left: Tensor, right: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of a gradient and of an input, transposed, in the formats of 8-bit GEMMs."""
    from runtime.parallel.float8_tensorwise import formats

    kinds = formats()
    gradient, x = (one.t().contiguous().to(device) for one in (left, right))
    return gradient.to(kinds.gradient), x.to(kinds.operand)
