"""Causal attention over a sequence that is split over ranks, by passing keys and values round.

The ring itself is PyTorch's (`_templated_ring_attention`); here are the kernels that it calls and their
place in autograd.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from costmodels.errors import InputError
from runtime.model.attention_kernels import pad_heads, repeat_heads, takes_flash

RING = "torch.distributed.tensor.experimental._context_parallel._attention"
NEEDED = (
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
    "_cp_options",
    "set_rotate_method",
)
"""PyTorch's ring attention, which is experimental: what its module must have."""

LSE_MULTIPLE = 32
"""The memory-efficient kernel pads log-sum-exps to a multiple of this many tokens."""


def prepare_ring() -> None:
    """Set PyTorch's ring, whose options are global to the process: real rotation, and balanced causal work.

    Raises:
        InputError: this PyTorch has no such ring.
    """
    try:
        ring = _ring()
        missing = [name for name in NEEDED if not hasattr(ring, name)]
    except ImportError:
        missing = [RING]
    if missing:
        raise InputError(
            f"context_parallel_form ring: PyTorch {torch.__version__} has no ring attention "
            f"({', '.join(missing)}); use all_gather or all_to_all"
        )
    ring._cp_options.enable_load_balance = True
    ring.set_rotate_method("alltoall")


def _ring() -> ModuleType:
    return import_module(RING)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's two chunks of queries while keys and values go round the ranks.

    Ring attention (arXiv:2310.01889) with the chunks of `local_positions`: in each of cp rounds a rank
    attends to the keys of one rank, without any that the mask would hide wholly, while the next ones
    travel; results are merged by their log-sum-exps in fp32. Only the K key/value heads travel. A rank
    sends (cp - 1) 2 B K s H elements forward. Backward sends as many again, and cp times 2 B K s H fp32
    elements: the gradients, which go round to their owners. Backward keeps what plain attention does on s
    tokens.

    Args:
        q: [B, N, s, H], tokens of chunk i, then of chunk 2 cp - 1 - i on rank i of `group`.
        k: [B, K, s, H], of the same tokens.
        v: the same shape.
        group: the context-parallel ranks.

    Returns:
        [B, N, s, H].
    """
    head = q.shape[-1]
    result: Tensor = _RingAttention.apply(*pad_heads(q, k, v), head**-0.5, group)  # type: ignore[no-untyped-call]
    return result.narrow(-1, 0, head)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        out, lse, *state = _ring()._templated_ring_attention(
            group, 2, _attend, q, k, v, is_causal=True, scale=scale
        )
        # Token by token in memory, as the output matrix reads and keeps it: backward needs no other copy.
        result: Tensor = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, result, lse, *state)
        ctx.scale, ctx.group = scale, group
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *state = ctx.saved_tensors
        gradients = _ring()._templated_ring_attention_backward(
            ctx.group,
            2,
            _attend_backward,
            grad,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            is_causal=True,
            scale=ctx.scale,
            state=state,
        )
        return *gradients[:3], None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Attention of one round: output, log-sum-exp [B, N, T], and what the kernel's backward asks for."""
    aten = torch.ops.aten
    if takes_flash(q):
        out, lse, _, _, _, _, *state, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, lse, *state
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse
    out, lse, *state = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, lse.narrow(2, 0, q.shape[2]), *state


def _attend_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one round, given the output and log-sum-exp of all rounds."""
    aten = torch.ops.aten
    tokens, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    if takes_flash(query):
        q, k, v = aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            None,
            None,
            tokens,
            key.shape[2],
            0.0,
            is_causal,
            *state,
            scale=scale,
        )
        return q, k, v
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    if query.device.type == "cpu":
        q, k, v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
        )
    else:
        padded = F.pad(logsumexp, (0, -tokens % LSE_MULTIPLE), value=torch.inf)
        q, k, v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            query,
            key,
            value,
            None,
            out,
            padded,
            *state,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
    groups = (key.shape[0], kv_heads, heads // kv_heads, *key.shape[2:])
    k, v = (x.reshape(groups).sum(2, dtype=torch.float32) for x in (k, v))
    return q, k, v
