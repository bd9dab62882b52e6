"""Direct calls of fused attention kernels, for attention with a backward pass of this package.

A layer may see only a window of earlier tokens, and its heads may have sinks. A sink is a learned score that
takes part in the softmax without a value (StreamingLLM, arXiv:2309.17453, as gpt-oss learns it). Shapes: see
`runtime.model`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.attention_kernels import pad_heads, repeat_heads, takes_flash
from runtime.model.capped_attention import capped_attention
from runtime.model.reach import Reach

LSE_MULTIPLE = 32
"""The memory-efficient kernel pads log-sum-exps to a multiple of this many tokens."""

_Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Inputs of a backward pass: the gradient of the output, queries, keys, values, and the output."""


def reaching_attention(
    q_BNTH: Tensor,
    k_BKPH: Tensor,
    v_BKPH: Tensor,
    reach: Reach,
    sinks_N: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of a sequence within their reach, and with sinks.

    Args:
        q_BNTH: [B, N, T, H], the last T tokens of those of `k_BKPH`.
        k_BKPH: [B, K, P, H], P at least T.
        v_BKPH: the same shape.
        reach: the reach of the layer.
        sinks_N: the score of each head's sink, if there are sinks.
        mask: [B, 1, T, P], added to the scores: 0, or -inf for hidden tokens.

    Returns:
        [B, N, T, H]. The flash kernel skips tokens outside of a window; other devices and number formats get
        a mask.
    """
    tokens, keys = q_BNTH.shape[2], k_BKPH.shape[2]
    if reach.softcap:
        assert sinks_N is None, "models with capped scores have no sinks"
        return capped_attention(q_BNTH, k_BKPH, v_BKPH, reach, mask)
    if reach.chunk and reach.binds(keys) and tokens == keys and mask is None and sinks_N is None:
        return _chunks_apart(q_BNTH, k_BKPH, v_BKPH, reach.chunk)
    head = q_BNTH.shape[-1]
    padded = pad_heads(q_BNTH, k_BKPH, v_BKPH) if q_BNTH.device.type == "cuda" else (q_BNTH, k_BKPH, v_BKPH)
    result_BNTH: Tensor = _Reaching.apply(*padded, sinks_N, reach, mask, head**-0.5)  # type: ignore[no-untyped-call]
    return result_BNTH.narrow(-1, 0, head)


def _chunks_apart(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, chunk: int) -> Tensor:
    """Causal attention within each chunk as a separate sequence; the last chunk is padded with zeros."""
    batch, heads, seq, head = q_BNSH.shape
    missing = -seq % chunk

    def apart(x: Tensor) -> Tensor:
        filled = F.pad(x, (0, 0, 0, missing)) if missing else x
        # Token by token in memory, as projections make it.
        parts = filled.transpose(1, 2).reshape(-1, chunk, x.shape[1], head)
        return parts.transpose(1, 2)

    q, k, v = apart(q_BNSH), apart(k_BKSH), apart(v_BKSH)
    result = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)
    together: Tensor = result.reshape(batch, seq + missing, heads, head)[:, :seq].transpose(1, 2)
    return together


class _Reaching(torch.autograd.Function):
    """Attention with a window and sinks. A sink is an additional column of scores whose value is zero.
    Backward therefore calls the kernels' backward with the log-sum-exp and the result of all columns,
    including sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BNTH: Tensor,
        k_BKPH: Tensor,
        v_BKPH: Tensor,
        sinks_N: Tensor | None,
        reach: Reach,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        window, bias = _window_or_mask(q_BNTH, k_BKPH, reach, mask)
        causal = bias is None
        out_BNTH, lse_BNT, *state = fused_forward(q_BNTH, k_BKPH, v_BKPH, causal, scale, bias, window)
        if sinks_N is not None:
            whole_BNT = torch.logaddexp(lse_BNT, sinks_N.float().unsqueeze(1))
            out_BNTH = out_BNTH * torch.exp(lse_BNT - whole_BNT).unsqueeze(-1).to(out_BNTH.dtype)
            lse_BNT = whole_BNT
        # Token by token in memory, as the output matrix reads and keeps it.
        result_BNTH: Tensor = out_BNTH.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q_BNTH, k_BKPH, v_BKPH, result_BNTH, lse_BNT, sinks_N, mask, *state)
        ctx.reach, ctx.scale = reach, scale
        return result_BNTH

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BNTH, k_BKPH, v_BKPH, out_BNTH, lse_BNT, sinks_N, mask, *state = ctx.saved_tensors
        window, bias = _window_or_mask(q_BNTH, k_BKPH, ctx.reach, mask)
        to_q, to_k, to_v = fused_backward(
            grad_out=grad_BNTH,
            query=q_BNTH,
            key=k_BKPH,
            value=v_BKPH,
            out=out_BNTH,
            logsumexp=lse_BNT,
            is_causal=bias is None,
            scale=ctx.scale,
            state=state,
            mask=bias,
            window=window,
        )
        to_sinks = None
        if sinks_N is not None:
            share_BNT = torch.exp(sinks_N.float().unsqueeze(1) - lse_BNT)
            taken_BNT = (grad_BNTH * out_BNTH).sum(-1, dtype=torch.float32)
            to_sinks = -(share_BNT * taken_BNT).sum((0, 2)).to(sinks_N.dtype)
        return to_q, to_k.to(k_BKPH.dtype), to_v.to(v_BKPH.dtype), to_sinks, None, None, None


def _window_or_mask(
    q_BNTH: Tensor, k_BKPH: Tensor, reach: Reach, mask: Tensor | None
) -> tuple[int, Tensor | None]:
    """Arguments of a kernel: a window (0: none), or a mask, which backward makes again."""
    tokens, keys = q_BNTH.shape[2], k_BKPH.shape[2]
    binds = reach.binds(keys)
    if mask is None and takes_flash(q_BNTH) and not (binds and reach.chunk):
        return reach.window * binds, None
    if mask is not None or (not binds and tokens == keys):
        return 0, mask
    queries = torch.arange(keys - tokens, keys, device=q_BNTH.device)
    return 0, reach.mask(queries, keys, q_BNTH.dtype)


def fused_forward(
    q_BNTH: Tensor,
    k_BKPH: Tensor,
    v_BKPH: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, ...]:
    """Attention: output, log-sum-exp [B, N, T], and further tensors for the kernel's backward.

    Args:
        is_causal: hide later tokens; if there are fewer queries than keys, they are the last tokens (flash
            kernel only).
        mask: added to the scores instead, [T, P] or [B, 1, T, P]; not for the flash kernel.
        window: tokens that each token sees; 0 for all. For the flash kernel only.
    """
    aten = torch.ops.aten
    if window:
        tokens, keys = q_BNTH.shape[2], k_BKPH.shape[2]
        q_BTNH, k_BPKH, v_BPKH = (x.transpose(1, 2) for x in (q_BNTH, k_BKPH, v_BKPH))
        out_BTNH, lse_BNT, *state = aten._flash_attention_forward(
            *(q_BTNH, k_BPKH, v_BPKH, None, None, tokens, keys, 0.0, True, False),
            scale=scale,
            window_size_left=window - 1,
            window_size_right=0,
        )
        return out_BTNH.transpose(1, 2), lse_BNT, *state[:2]
    if mask is None and takes_flash(q_BNTH):
        out_BNTH, lse_BNT, _, _, _, _, *state, _ = aten._scaled_dot_product_flash_attention(
            q_BNTH, k_BKPH, v_BKPH, 0.0, is_causal, scale=scale
        )
        return out_BNTH, lse_BNT, *state
    k_BKPH, v_BKPH = repeat_heads(k_BKPH, q_BNTH.shape[1]), repeat_heads(v_BKPH, q_BNTH.shape[1])
    if q_BNTH.device.type == "cpu":
        out_BNTH, lse_BNT = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTH, k_BKPH, v_BKPH, 0.0, is_causal, scale=scale, attn_mask=mask
        )
        return out_BNTH, lse_BNT
    bias = _expanded(mask, q_BNTH, k_BKPH)
    out_BNTH, lse_BNT, *state = aten._scaled_dot_product_efficient_attention(
        q_BNTH, k_BKPH, v_BKPH, bias, True, 0.0, is_causal, scale=scale
    )
    return out_BNTH, lse_BNT.narrow(2, 0, q_BNTH.shape[2]), *state


def fused_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
    state: list[Tensor],
    mask: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the output and log-sum-exp of all columns that share the softmax."""
    given = grad_out, query, key, value, out
    if window:
        return _window_backward(given, logsumexp, state, scale, window)
    if mask is None and takes_flash(query):
        sizes = query.shape[2], key.shape[2]
        q, k, v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *given, logsumexp, None, None, *sizes, 0.0, is_causal, *state, scale=scale
        )
        return q, k, v
    return _repeated_backward(given, logsumexp, state, scale, is_causal, mask)


def _window_backward(
    given: _Given, logsumexp: Tensor, state: list[Tensor], scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by the flash kernel with a window."""
    sizes = given[1].shape[2], given[2].shape[2]
    q, k, v = torch.ops.aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in given),
        *(logsumexp, None, None, *sizes, 0.0, True, *state),
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _repeated_backward(
    given: _Given, logsumexp: Tensor, state: list[Tensor], scale: float, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by kernels that need equal numbers of key and query heads."""
    aten, (grad_out, query, key, value, out) = torch.ops.aten, given
    tokens, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    if query.device.type == "cpu":
        q, k, v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale, attn_mask=mask
        )
    else:
        padded = F.pad(logsumexp, (0, -tokens % LSE_MULTIPLE), value=torch.inf)
        bias = _expanded(mask, query, key)
        wanted = [True, True, True, False]
        q, k, v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, key, value, bias, out, padded, *state, 0.0, wanted, is_causal, scale=scale
        )
    groups = (key.shape[0], kv_heads, heads // kv_heads, *key.shape[2:])
    k, v = (x.reshape(groups).sum(2, dtype=torch.float32) for x in (k, v))
    return q, k, v


def _expanded(mask: Tensor | None, q_BNTH: Tensor, k_BNPH: Tensor) -> Tensor | None:
    """A mask expanded to all heads without copying."""
    return None if mask is None else mask.expand(*q_BNTH.shape[:3], k_BNPH.shape[2])
