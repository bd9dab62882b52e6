"""Stand-ins for the kernels of the described device, for tensors without memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.dryrun.fake_gpu import CPP_DEVICE, cpp_device
from runtime.model.attention_kernels import pad_heads, takes_flash

aten = torch.ops.aten


@contextmanager
def gpu_kernels(fake: FakeTensorMode) -> Iterator[None]:
    """Within this context PyTorch's functions run as in its CUDA build, on tensors of `fake`'s GPU."""
    attend, norm, empty, to = F.scaled_dot_product_attention, F.rms_norm, torch.empty, Tensor.to

    def attending(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (attention if query.is_cuda else attend)(query, *args, **kwargs)

    def normalising(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The compiler makes a kernel of its own.
        if input.is_cuda and not torch.compiler.is_compiling():
            weight: Tensor = kwargs.get("weight", args[1])
            normalised: Tensor = _FusedRmsNorm.apply(input, weight)  # type: ignore[no-untyped-call]
            return normalised
        return norm(input, *args, **kwargs)

    def made_empty(*args: Any, **kwargs: Any) -> Tensor:
        # Only a real GPU can pin memory.
        kwargs.pop("pin_memory", None)
        if active_fake_mode() is None and cpp_device(kwargs.get("device")) == CPP_DEVICE:
            # Stages are built on the real meta device.
            with fake:
                return empty(*args, **kwargs)
        return empty(*args, **kwargs)

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = cpp_device(kwargs["device"])
        return to(tensor, *(cpp_device(part) for part in args), **kwargs)

    def nothing(tensor: Tensor, *args: Any) -> Tensor:
        return tensor

    with (
        patch.object(F, "scaled_dot_product_attention", attending),
        patch.object(F, "rms_norm", normalising),
        patch.object(torch, "empty", made_empty),
        patch.object(Tensor, "to", moved),
        patch.object(Tensor, "pin_memory", nothing),
        patch.object(Tensor, "record_stream", nothing),
    ):
        yield


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Within this context fake CPU tensors support grouped GEMMs in any format, like real ones."""
    grouped = F.grouped_mm

    def multiplied(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor, **kwargs: Any) -> Tensor:
        if mat_a.dtype != torch.bfloat16:
            result: Tensor = _GroupedProduct.apply(mat_a, mat_b, offs)  # type: ignore[no-untyped-call]
            return result
        return grouped(mat_a, mat_b, offs=offs, **kwargs)

    with patch.object(F, "grouped_mm", multiplied):
        yield


class _GroupedProduct(torch.autograd.Function):
    """A grouped GEMM of rows [R, K] by matrices [E, K, N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return rows.new_empty(rows.shape[0], matrices.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        rows, matrices, _ = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(matrices), None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the first CUDA kernel that accepts the operands.

    Flash attention accepts 16-bit heads of one size without a mask. The memory-efficient kernel does not
    accept grouped queries. Otherwise all scores are kept.
    """
    heads = {x.shape[-1] for x in (query, key, value)}
    if attn_mask is None and len(heads) == 1 and takes_flash(query):
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        q, k, v = pad_heads(query, key, value)
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return out[..., : query.shape[-1]] if out.shape[-1] != query.shape[-1] else out
    alignment = 4 if query.dtype == torch.float32 else 8
    if not enable_gqa and not any(size % alignment for size in heads):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        result: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
        return result
    scores: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return scores


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's RMS norm kernel, which keeps its input, its weight if any, and 4 bytes for each row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty(*input.shape[:-1], 1, dtype=torch.float32, device=input.device)
        ctx.save_for_backward(input, weight, rows)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight)
