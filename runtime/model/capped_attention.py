"""Attention whose scores are bounded (Gemma 2, arXiv:2408.00118, section 2.4), in blocks of queries.

No kernel of PyTorch's bounds scores but what it compiles, so that products of matrices do it: forward keeps
queries, keys, values and results, and backward makes the scores of a block anew, as flash attention does
(arXiv:2205.14135, section 3.1). Shapes: see `runtime.model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.model.reach import Reach

BLOCK = 128
"""Queries whose scores are there at a time."""


def capped_attention(
    q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor, reach: Reach, mask: Tensor | None = None
) -> Tensor:
    """Causal attention of the last T of P tokens within their reach, by scores that it bounds.

    Args:
        q_BNTH: [B, N, T, H].
        k_BKPH: [B, K, P, H].
        v_BKPH: the same shape.
        reach: of the layer.
        mask: [B, 1, T, P], added to the scores: 0, or -inf to hide, at least what comes later.

    Returns:
        [B, N, T, H], token by token in memory, as the output matrix reads it.
    """
    result_BNTH: Tensor = _Capped.apply(q_BNTH, k_BKPH, v_BKPH, reach, mask)  # type: ignore[no-untyped-call]
    return result_BNTH


class _Block(NamedTuple):
    """Queries that are computed together, and the keys that any of them sees."""

    queries: slice
    keys: slice


def _blocks(reach: Reach, tokens: int, keys: int, is_masked: bool) -> Iterator[_Block]:
    for first in range(0, tokens, BLOCK):
        last = min(first + BLOCK, tokens)
        # Positions in the sequence of the first query, and after the last one.
        start, end = keys - tokens + first, keys - tokens + last
        least = 0
        if is_masked:
            end = keys
        elif reach.window:
            least = max(0, start + 1 - reach.window)
        elif reach.chunk:
            least = start - start % reach.chunk
        yield _Block(slice(first, last), slice(least, end))


def _by_keys(x_BNTH: Tensor, block: _Block, shared: int) -> Tensor:
    """The queries of a block, [B, K, M, H]: M are those of each of the heads that share keys."""
    batch, _, _, head = x_BNTH.shape
    return x_BNTH[:, :, block.queries].reshape(batch, shared, -1, head)


def _bounded(
    q_BKMH: Tensor, k_BKph: Tensor, hidden: Tensor, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The probabilities of a block, and its scores over the bound, both [B, K, M, p] in fp32."""
    bounded = torch.tanh((q_BKMH @ k_BKph.transpose(2, 3)).float() * (scale / softcap))
    shape = bounded.shape
    scores = (bounded * softcap).view(*shape[:2], -1, hidden.shape[-2], shape[3]) + hidden
    return scores.view(shape).softmax(-1), bounded


def _hidden(reach: Reach, block: _Block, tokens: int, keys: int, mask: Tensor | None, q: Tensor) -> Tensor:
    """What is added to the scores of a block: [t, p], or [B, 1, 1, t, p] of a mask."""
    if mask is not None:
        found = mask[:, :, block.queries, block.keys].unsqueeze(1)
        if not reach.binds(keys):
            return found
    at_t = torch.arange(
        keys - tokens + block.queries.start, keys - tokens + block.queries.stop, device=q.device
    )
    own_tp = reach.mask(at_t, keys, torch.float32)[:, block.keys]
    return own_tp if mask is None else found + own_tp


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor, reach: Reach, mask: Tensor | None
    ) -> Tensor:
        tokens, keys, shared = q_BNTH.shape[2], k_BKPH.shape[2], k_BKPH.shape[1]
        out_BNTH = torch.empty_like(q_BNTH.transpose(1, 2), memory_format=torch.contiguous_format)
        out_BNTH = out_BNTH.transpose(1, 2)
        scale = q_BNTH.shape[-1] ** -0.5
        for block in _blocks(reach, tokens, keys, mask is not None):
            q_BKMH = _by_keys(q_BNTH, block, shared)
            hidden = _hidden(reach, block, tokens, keys, mask, q_BNTH)
            shares, _ = _bounded(q_BKMH, k_BKPH[:, :, block.keys], hidden, reach.softcap, scale)
            result_BKMH = shares.to(v_BKPH.dtype) @ v_BKPH[:, :, block.keys]
            own = out_BNTH[:, :, block.queries]
            own.copy_(result_BKMH.view(own.shape))
        ctx.save_for_backward(q_BNTH, k_BKPH, v_BKPH, out_BNTH, mask)
        ctx.reach = reach
        return out_BNTH

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BNTH, k_BKPH, v_BKPH, out_BNTH, mask = ctx.saved_tensors
        reach: Reach = ctx.reach
        tokens, keys, shared = q_BNTH.shape[2], k_BKPH.shape[2], k_BKPH.shape[1]
        scale = q_BNTH.shape[-1] ** -0.5
        to_q = torch.empty_like(q_BNTH)
        to_k, to_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k_BKPH, v_BKPH))
        for block in _blocks(reach, tokens, keys, mask is not None):
            q_BKMH, grad_BKMH, out_BKMH = (_by_keys(x, block, shared) for x in (q_BNTH, grad_BNTH, out_BNTH))
            k_here, v_here = k_BKPH[:, :, block.keys], v_BKPH[:, :, block.keys]
            hidden = _hidden(reach, block, tokens, keys, mask, q_BNTH)
            shares, bounded = _bounded(q_BKMH, k_here, hidden, reach.softcap, scale)
            to_v[:, :, block.keys] += shares.to(grad_BKMH.dtype).transpose(2, 3) @ grad_BKMH
            taken = (grad_BKMH.float() * out_BKMH.float()).sum(-1, keepdim=True)
            to_scores = (grad_BKMH @ v_here.transpose(2, 3)).float()
            to_scores = shares * (to_scores - taken) * (1.0 - bounded.square()) * scale
            to_scores = to_scores.to(q_BKMH.dtype)
            own = to_q[:, :, block.queries]
            own.copy_((to_scores @ k_here).view(own.shape))
            to_k[:, :, block.keys] += to_scores.transpose(2, 3) @ q_BKMH
        return to_q, to_k.to(k_BKPH.dtype), to_v.to(v_BKPH.dtype), None, None
