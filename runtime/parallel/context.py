"""Context parallelism: sequences split over ranks, with attention over all ranks.

Everything except attention works token by token, so a rank runs the model on its S/cp positions. Only the
core of attention, softmax(q k) v, needs keys and values of other ranks. `Layout.context_parallel_form`
chooses the communication. Bytes that one rank sends for one layer and microbatch, with e bytes an element, s
= S/cp, N and K the query and key/value heads after tensor parallelism, and kv = 2 B K s H:

    form         forward                             backward
    all_gather   (cp - 1) kv e                       (cp - 1) kv e
    all_to_all   (cp - 1) / cp B s H 2 (N + K') e    the same; K' = K cp / gcd(K, cp)
    ring         (cp - 1) kv e                       (cp - 1) kv e + cp kv 4

Recomputing core attention repeats the forward part, but for all_to_all's way back to tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels import Layout, ModelSpec
from costmodels.spec.layout import ContextParallelForm
from runtime.model.attention import OverRanks
from runtime.model.attention_kernels import DocumentMasks, equal_heads_attention
from runtime.model.reach import Reach
from runtime.model.transformer import Transformer
from runtime.parallel.context_attention import exchanged_attention, gathered_attention
from runtime.parallel.mesh import Grid
from runtime.parallel.zigzag import rank_order

CoreForward = Callable[..., Tensor]
"""The core of attention on one rank: q [B, N, S/cp, H], k and v [B, K, S/cp, H], and the group, to [B, N,
S/cp, H]."""


def _core_forward(form: ContextParallelForm) -> CoreForward:
    if form == "ring":
        # The ring's module readies the compiler, a second that no other form need wait for.
        from runtime.parallel.ring_attention import ring_attention

        ring: CoreForward = ring_attention
        return ring
    return gathered_attention if form == "all_gather" else exchanged_attention


def local_positions(spec: ModelSpec, layout: Layout, cp_rank: int) -> Tensor:
    """Positions of the sequence that a context-parallel rank holds, in its order: [S / cp].

    If ranks keep their tokens in attention, tokens are divided in the order of `runtime.parallel.zigzag`.
    all_to_all has whole sequences in attention, so each rank has one chunk.
    """
    positions, ranks = torch.arange(spec.seq), layout.context_parallel
    if layout.context_parallel_form != "all_to_all":
        positions = rank_order(positions, ranks, 0)
    return positions.chunk(ranks)[cp_rank]


def uses_ring(layout: Layout) -> bool:
    """Return whether keys and values are passed around in a ring."""
    return layout.context_parallel > 1 and layout.context_parallel_form == "ring"


def context_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Extend the attention of `stage` to the tokens of all context-parallel ranks.

    Raises:
        InputError: the form is ring and this PyTorch has no ring attention.
    """
    assert grid.cp_group is not None
    if uses_ring(layout):
        from runtime.parallel.ring_attention import prepare_ring

        prepare_ring()
    for block in stage.blocks:
        core = block.attention.core
        core.over_ranks = _over_ranks(layout.context_parallel_form, grid.cp_group, core.reach)


# One object for all layers of a kind and all stages: torch.compile would compile each anew, up to its limit
# of 8.
@lru_cache(maxsize=2)
def _over_ranks(form: ContextParallelForm, group: dist.ProcessGroup, reach: Reach) -> OverRanks:
    kernel = partial(_core_forward(form), group=group)

    def attend(
        q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, documents: DocumentMasks, sinks_N: Tensor | None
    ) -> Tensor:
        # Keys and values travel together, so their heads must have the same size.
        within = kernel
        if form != "ring":
            within = partial(kernel, documents=documents, reach=reach, sinks_N=sinks_N)
        return equal_heads_attention(within, q_BNsH, k_BKsH, v_BKsH)

    return attend
