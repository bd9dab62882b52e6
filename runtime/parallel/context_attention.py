"""Causal attention over a sequence that is split over ranks, by gathering keys or by exchanging heads.

Shapes: see `runtime.model`. Tensors are sent with the token dimension first, [s, ...], so the received
tensors of all ranks are the whole sequence without further copies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from runtime.model.attention_kernels import DocumentMasks, masked_attention, repeat_heads, suffix_attention
from runtime.model.fused_attention import reaching_attention
from runtime.model.reach import EVERYTHING, Reach
from runtime.parallel.collectives import all_gather, exchange_slices, sum_parts
from runtime.parallel.zigzag import rank_order, sequence_order


def gathered_attention(
    q_BNsH: Tensor,
    k_BKsH: Tensor,
    v_BKsH: Tensor,
    group: dist.ProcessGroup,
    documents: DocumentMasks | None = None,
    reach: Reach = EVERYTHING,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's two chunks of queries over gathered keys and values.

    This is Llama 3's form (arXiv:2407.21783, section 3.3.2) with the chunks of `local_positions`. Only the K
    key/value heads are sent, keys and values in one all-gather; backward reduce-scatters their gradients. A
    rank sends (cp - 1) 2 B K s H elements forward and as many backward. Backward keeps the gathered keys and
    values, 2 B K S H elements instead of 2 B K s H. It also keeps its two results beside the concatenated
    one, B N s H elements more than plain attention on s tokens. Recomputed core attention keeps neither.

    Args:
        q_BNsH: tokens of chunk i, then of chunk 2 cp - 1 - i on rank i of `group`.
        k_BKsH: of the same tokens.
        v_BKsH: of the same tokens.
        group: the context-parallel ranks.
        documents: holds masks where attention stays within documents.
        reach: what tokens see.
        sinks_N: the scores of sinks.

    Returns:
        [B, N, s, H].
    """
    name, size, rank = group.group_name, group.size(), group.rank()
    first, last = q_BNsH.chunk(2, dim=2)
    k_first, v_first, k_last, v_last = _GatherPrefixes.apply(k_BKsH, v_BKsH, name, size, rank)  # type: ignore[no-untyped-call]
    masks = (None, None) if documents is None or not documents.masks else documents.masks
    if not reach.is_everything(k_BKsH.shape[2] * size) or sinks_N is not None:
        parts = (
            reaching_attention(first, k_first, v_first, reach, sinks_N, masks[0]),
            reaching_attention(last, k_last, v_last, reach, sinks_N, masks[1]),
        )
    elif masks[0] is not None and masks[1] is not None:
        parts = (
            masked_attention(first, k_first, v_first, masks[0]),
            masked_attention(last, k_last, v_last, masks[1]),
        )
    else:
        parts = suffix_attention(first, k_first, v_first), suffix_attention(last, k_last, v_last)
    # Token by token in memory, as the output matrix reads it.
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


class _GatherPrefixes(torch.autograd.Function):
    """Keys and values up to the end of this rank's first chunk, and up to the end of its second chunk."""

    @staticmethod
    def forward(
        ctx: Any, k_BKsH: Tensor, v_BKsH: Tensor, group: str, size: int, rank: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        local_s2BKH = torch.stack((k_BKsH.permute(2, 0, 1, 3), v_BKsH.permute(2, 0, 1, 3)), dim=1)
        whole_S2BKH = sequence_order(all_gather(local_s2BKH, group, size), size, 0)
        chunk = k_BKsH.shape[2] // 2
        ctx.ends = (rank + 1) * chunk, (2 * size - rank) * chunk
        ctx.group, ctx.size, ctx.seq = group, size, whole_S2BKH.shape[0]
        k_first, v_first, k_last, v_last = (
            whole_S2BKH[:end, which].permute(1, 2, 0, 3) for end in ctx.ends for which in (0, 1)
        )
        return k_first, v_first, k_last, v_last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        k_first, v_first, k_last, v_last = (grad.permute(2, 0, 1, 3) for grad in grads)
        first, last = ctx.ends
        whole_S2BKH = k_last.new_empty(ctx.seq, 2, *k_last.shape[1:])
        whole_S2BKH[:last, 0], whole_S2BKH[:last, 1] = k_last, v_last
        whole_S2BKH[last:] = 0
        whole_S2BKH[:first, 0] += k_first
        whole_S2BKH[:first, 1] += v_first
        local_s2BKH = sum_parts(rank_order(whole_S2BKH, ctx.size, 0), ctx.group, ctx.size)
        k, v = (local_s2BKH[:, which].permute(1, 2, 0, 3) for which in (0, 1))
        return k, v, None, None, None


def exchanged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    documents: DocumentMasks | None = None,
    reach: Reach = EVERYTHING,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention over whole sequences, with each rank on its share of the heads.

    As in DeepSpeed-Ulysses (arXiv:2309.14509, section 3), one all-to-all exchanges tokens for heads of q, k
    and v, and another one exchanges the result back. Backward does the reverse. Each key/value head is first
    repeated cp / gcd(K, cp) times, the fewest repeats that give every rank the heads of its queries. A rank
    sends (cp - 1) / cp B s H (2 N + 2 K cp / gcd(K, cp)) elements forward and as many backward. Backward
    keeps the repeated keys and values, and the result before and after the exchange: B N s H elements more
    than plain attention on s tokens.

    Args:
        q: [B, N, s, H], the tokens of chunk i of cp on rank i of `group`; cp divides N.
        k: [B, K, s, H], of the same tokens.
        v: the same shape.
        group: the context-parallel ranks.
        documents: holds masks where attention stays within documents.
        reach: what tokens see.
        sinks_N: the scores of sinks.

    Returns:
        [B, N, s, H].
    """
    size = group.size()
    batch, heads, tokens, head = q.shape
    kv_heads = math.lcm(k.shape[1], size)
    k, v = repeat_heads(k, kv_heads), repeat_heads(v, kv_heads)
    shares = [heads // size, kv_heads // size, kv_heads // size]
    # [cp, s, B, heads / cp, H]: what rank j needs is slice j.
    parts = [
        x.view(batch, size, share, tokens, head).permute(1, 3, 0, 2, 4)
        for x, share in zip((q, k, v), shares, strict=True)
    ]
    sent = torch.cat(parts, dim=3).flatten(0, 1)
    received = torch.split(exchange_slices(sent, group), shares, dim=2)
    q, k, v = (x.permute(1, 2, 0, 3) for x in received)
    mask_B1SS = documents.masks[0] if documents is not None and documents.masks else None
    if not reach.is_everything(q.shape[2]) or sinks_N is not None:
        own_sinks = None if sinks_N is None else sinks_N.chunk(size)[group.rank()]
        result = reaching_attention(q, k, v, reach, own_sinks, mask_B1SS)
    elif mask_B1SS is not None:
        result = masked_attention(q, k, v, mask_B1SS)
    else:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares[0] != shares[1])
    back = exchange_slices(result.permute(2, 0, 1, 3), group)
    # [cp, s, B, N / cp, H] to [B, N, s, H], token by token in memory.
    own = back.view(size, tokens, batch, heads // size, head).permute(2, 1, 0, 3, 4)
    attended: Tensor = own.reshape(batch, tokens, heads, head).transpose(1, 2)
    return attended
