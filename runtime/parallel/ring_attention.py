"""Causal attention over a sequence split over ranks, by passing keys and values in a ring.

The ring is PyTorch's (`_templated_ring_attention`); this module makes it differentiable. Shapes: see
`runtime.model`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels.errors import InputError
from costmodels.pytorch import full_version
from runtime.model.attention_kernels import pad_heads
from runtime.model.fused_attention import fused_backward, fused_forward

RING_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
RING_FUNCTIONS = (
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
    "_cp_options",
    "set_rotate_method",
)
"""Functions that the module of PyTorch's experimental ring attention must have."""


def prepare_ring() -> None:
    """Set the options of PyTorch's ring, which are global to the process: real rotation, and balanced causal
    work.

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
            f"context_parallel_form ring: PyTorch {full_version()} has no ring attention "
            f"({', '.join(missing)}); use all_gather or all_to_all"
        )
    ring._cp_options.enable_load_balance = True
    ring.set_rotate_method("alltoall")


def _ring() -> ModuleType:
    return import_module(RING_MODULE)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's two chunks of queries, with keys and values passed in a ring.

    This is ring attention (arXiv:2310.01889) with the chunks of `local_positions`. In each of cp rounds a
    rank attends to the keys of one rank, while the next keys are sent; fully masked keys are skipped. Results
    are merged by their log-sum-exps in fp32. Only the K key/value heads are sent. A rank sends (cp - 1) 2 B K
    s H elements in forward. Backward sends the same again, and cp times 2 B K s H fp32 elements of gradients,
    which are passed around to their owners. Backward keeps the same tensors as plain attention on s tokens.

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
            group, 2, fused_forward, q_BNsH, k_BKsH, v_BKsH, is_causal=True, scale=scale
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
            fused_backward,
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
