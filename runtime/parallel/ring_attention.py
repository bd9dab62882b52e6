"""Causal attention over a sequence that is split over ranks, by passing keys and values round.

The ring itself is PyTorch's (`_templated_ring_attention`); here are the kernels that it calls and their
place in autograd. Shapes: see `runtime.model`.
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

RING_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
RING_FUNCTIONS = (
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
        missing = [name for name in RING_FUNCTIONS if not hasattr(ring, name)]
    except ImportError:
        missing = [RING_MODULE]
    if missing:
        raise InputError(
            f"context_parallel_form ring: PyTorch {torch.__version__} has no ring attention "
            f"({', '.join(missing)}); use all_gather or all_to_all"
        )
    ring._cp_options.enable_load_balance = True
    ring.set_rotate_method("alltoall")


def _ring() -> ModuleType:
    return import_module(RING_MODULE)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's two chunks of queries while keys and values go round the ranks.

    Ring attention (arXiv:2310.01889) with the chunks of `local_positions`: in each of cp rounds a rank
    attends to the keys of one rank, without any that the mask would hide wholly, while the next ones
    travel; results are merged by their log-sum-exps in fp32. Only the K key/value heads travel. A rank
    sends (cp - 1) 2 B K s H elements forward. Backward sends as many again, and cp times 2 B K s H fp32
    elements: the gradients, which go round to their owners. Backward keeps what plain attention does on s
    tokens.

    Args:
        q_BNsH: tokens of chunk i, then of chunk 2 cp - 1 - i on rank i of `group`.
        k_BKsH: of the same tokens.
        v_BKsH: of the same tokens.
        group: the context-parallel ranks.

    Returns:
        [B, N, s, H].
    """
    head = q_BNsH.shape[-1]
    result_BNsH: Tensor = _RingAttention.apply(*pad_heads(q_BNsH, k_BKsH, v_BKsH), head**-0.5, group)  # type: ignore[no-untyped-call]
    return result_BNsH.narrow(-1, 0, head)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, scale: float, group: dist.ProcessGroup
    ) -> Tensor:
        out_BNsH, lse_BNs, *state = _ring()._templated_ring_attention(
            group, 2, _attend, q_BNsH, k_BKsH, v_BKsH, is_causal=True, scale=scale
        )
        # Token by token in memory, as the output matrix reads and keeps it: backward needs no other copy.
        result_BNsH: Tensor = out_BNsH.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q_BNsH, k_BKsH, v_BKsH, result_BNsH, lse_BNs, *state)
        ctx.scale, ctx.group = scale, group
        return result_BNsH

    @staticmethod
    def backward(ctx: Any, grad_BNsH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BNsH, k_BKsH, v_BKsH, out_BNsH, lse_BNs, *state = ctx.saved_tensors
        gradients = _ring()._templated_ring_attention_backward(
            ctx.group,
            2,
            _attend_backward,
            grad_BNsH,
            "grad_out",
            q_BNsH,
            k_BKsH,
            v_BKsH,
            out_BNsH,
            lse_BNs,
            is_causal=True,
            scale=ctx.scale,
            state=state,
        )
        return *gradients[:3], None, None


def _attend(
    q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Attention of one round: output, log-sum-exp [B, N, T], and what the kernel's backward asks for."""
    aten = torch.ops.aten
    if takes_flash(q_BNTH):
        out_BNTH, lse_BNT, _, _, _, _, *state, _ = aten._scaled_dot_product_flash_attention(
            q_BNTH, k_BKPH, v_BKPH, 0.0, is_causal, scale=scale
        )
        return out_BNTH, lse_BNT, *state
    k_BKPH, v_BKPH = repeat_heads(k_BKPH, q_BNTH.shape[1]), repeat_heads(v_BKPH, q_BNTH.shape[1])
    if q_BNTH.device.type == "cpu":
        out_BNTH, lse_BNT = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTH, k_BKPH, v_BKPH, 0.0, is_causal, scale=scale
        )
        return out_BNTH, lse_BNT
    out_BNTH, lse_BNT, *state = aten._scaled_dot_product_efficient_attention(
        q_BNTH, k_BKPH, v_BKPH, None, True, 0.0, is_causal, scale=scale
    )
    return out_BNTH, lse_BNT.narrow(2, 0, q_BNTH.shape[2]), *state


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
