"""Gradients of collectives as a compiler makes them, and threads of process groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.parallel import collectives
from runtime.parallel.context_attention import gathered_attention
from tests.support.autograd_functions import Case, compiled_difference, drawn


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """A case of each function of `runtime.parallel.collectives`, and of functions made of them, by name."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    x = drawn(4, 6, seed=rank).to(dtype)
    along: list[Callable[..., Tensor]] = [
        collectives.gather,
        collectives.reduce_scatter,
        collectives.split_to_ranks,
        collectives.join_from_ranks,
    ]
    whole: list[Callable[..., Tensor]] = [
        collectives.copy_to_ranks,
        collectives.reduce_from_ranks,
        collectives.exchange_slices,
    ]
    found = {one.__name__: Case(lambda x, one=one: one(2 * x, 0, group), (x,)) for one in along}
    found |= {one.__name__: Case(lambda x, one=one: one(2 * x, group), (x,)) for one in whole}

    heads = [drawn(2, heads, 8, 16, seed=rank).to(dtype) for heads in (4, 2, 2)]
    found["gathered_attention"] = Case(lambda q, k, v: gathered_attention(q, k, v, group), tuple(heads))
    return found


def compiled_differences(dtypes: Sequence[torch.dtype]) -> dict[tuple[str, torch.dtype], float]:
    """The largest relative difference that a compiler makes to results and gradients, by name and format."""
    return {
        (name, dtype): compiled_difference(case, "aot_eager")
        for dtype in dtypes
        for name, case in cases(dtype).items()
    }


def gloo_threads(interface: str, groups: int) -> tuple[int, float]:
    """Make groups of gloo over an interface; returns the number of their worker threads, and a sum of all
    ranks' ones by the last group.
    """
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": interface}):
        made: list[Any] = [dist.new_group(backend="gloo") for _ in range(groups)]
    ones = torch.ones(())
    dist.all_reduce(ones, group=made[-1])
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names), float(ones)
