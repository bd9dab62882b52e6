"""Gradients of collectives as a compiler makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
