"""The choice among PyTorch's attention kernels, with masks, grouped heads and heads of two sizes.

Shapes: see `runtime.model`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_DTYPES = (torch.float16, torch.bfloat16)


FLASH_HEAD_SIZE = 256
"""Largest head size of the CUDA flash kernel."""


FLASH_CAPABILITY = (8, 0)
"""The first GPU architecture with flash attention: Ampere."""


def takes_flash(q: Tensor) -> bool:
    """True if PyTorch's CUDA flash kernel supports `q`; it runs grouped queries without copies of keys."""
    if q.device.type != "cuda" or q.dtype not in FLASH_DTYPES or q.shape[-1] > FLASH_HEAD_SIZE:
        return False
    # Without a GPU these are fake tensors, which stand for ones on a GPU of today.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY


def pad_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with each head padded with zeros to a multiple of 8 elements, as CUDA kernels require."""
    missing = -tensors[0].shape[-1] % 8
    return tuple(F.pad(x, (0, missing)) for x in tensors) if missing else tensors


class DocumentMasks:
    """The document masks that attention with one reach adds to scores in the current microbatch.

    They hide other documents, later tokens, and tokens outside of the window or chunk. There is one mask [B,
    1, S, S] for attention over whole sequences, one for each part of the queries with gathered keys, and none
    if documents do not matter. `runtime.parallel.documents` makes them.
    """

    masks: tuple[Tensor, ...] = ()


def masked_attention(q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor, mask_B1TP: Tensor) -> Tensor:
    """Attention like `suffix_attention`, but with a mask [B, 1, T, P] that is added to the scores."""
    grouped = q_BNTH.shape[1] != k_BKPH.shape[1]
    if grouped and q_BNTH.device.type == "cuda":
        # No CUDA kernel but flash takes grouped queries, and the fallback would hold all scores.
        k_BKPH, v_BKPH = repeat_heads(k_BKPH, q_BNTH.shape[1]), repeat_heads(v_BKPH, q_BNTH.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(q_BNTH, k_BKPH, v_BKPH, mask_B1TP, enable_gqa=grouped)


def suffix_attention(q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence.

    Args:
        q_BNTH: [B, N, T, H], the last T tokens of those of `k_BKPH`.
        k_BKPH: [B, K, P, H], P at least T.
        v_BKPH: the same shape.

    Returns:
        [B, N, T, H]. The flash kernel skips hidden tokens; its causal mask is that of the last tokens
        (FlashAttention 2.1). Other devices and dtypes get a mask of [T, P].
    """
    grouped = q_BNTH.shape[1] != k_BKPH.shape[1]
    tokens, keys, head = q_BNTH.shape[2], k_BKPH.shape[2], q_BNTH.shape[3]
    if tokens == keys:
        return F.scaled_dot_product_attention(q_BNTH, k_BKPH, v_BKPH, is_causal=True, enable_gqa=grouped)
    if takes_flash(q_BNTH):
        q_BNTH, k_BKPH, v_BKPH = pad_heads(q_BNTH, k_BKPH, v_BKPH)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        result_BNTH: Tensor = flash(q_BNTH, k_BKPH, v_BKPH, 0.0, True, scale=head**-0.5)[0]
        return result_BNTH.narrow(-1, 0, head)
    mask_TP = torch.ones(tokens, keys, dtype=torch.bool, device=q_BNTH.device).tril(keys - tokens)
    return masked_attention(q_BNTH, k_BKPH, v_BKPH, mask_TP)


def repeat_heads(x_BKSH: Tensor, heads: int) -> Tensor:
    """[B, heads, S, H] with each head of [B, K, S, H] repeated."""
    times = heads // x_BKSH.shape[1]
    return x_BKSH.repeat_interleave(times, dim=1) if times > 1 else x_BKSH


def equal_heads_attention(
    attend: Callable[..., Tensor], q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor
) -> Tensor:
    """Attention by a kernel for one head size only; smaller heads are padded with zeros."""
    keys, values = q_BNSH.shape[-1], v_BKSH.shape[-1]
    if keys == values:
        return attend(q_BNSH, k_BKSH, v_BKSH)
    if keys < values:
        # The kernel divides scores by the square root of the padded size.
        q_BNSH, k_BKSH = (F.pad(x, (0, values - keys)) for x in (q_BNSH * (values / keys) ** 0.5, k_BKSH))
    else:
        v_BKSH = F.pad(v_BKSH, (0, keys - values))
    return attend(q_BNSH, k_BKSH, v_BKSH)[..., :values]
