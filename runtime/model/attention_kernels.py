"""Kernels of attention: which of PyTorch's takes what, with masks, grouped heads and heads of two sizes.

Shapes: B micro batch, S sequence, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_DTYPES = (torch.float16, torch.bfloat16)


FLASH_HEAD_SIZE = 256
"""Largest head that the CUDA flash kernel takes."""


FLASH_CAPABILITY = (8, 0)
"""First architecture that it runs on: Ampere."""


def takes_flash(q: Tensor) -> bool:
    """Whether PyTorch's CUDA flash kernel takes `q`; it runs grouped queries without copies of keys."""
    if q.device.type != "cuda" or q.dtype not in FLASH_DTYPES or q.shape[-1] > FLASH_HEAD_SIZE:
        return False
    # Without a GPU these are fake tensors, which stand for ones on a GPU of today.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY


def pad_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with zeros added to each head up to a multiple of 8 elements, as CUDA kernels need it."""
    missing = -tensors[0].shape[-1] % 8
    return tuple(F.pad(x, (0, missing)) for x in tensors) if missing else tensors


class DocumentMasks:
    """What attention within documents adds to scores, in the micro batch that runs.

    One mask [B, 1, S, S] where attention sees whole sequences, one for each chunk of queries where it gathers
    keys; none where documents do not matter. `runtime.parallel.documents` makes them.
    """

    masks: tuple[Tensor, ...] = ()


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask [B, 1, T, P] that is added to the scores, else as `suffix_attention`."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type == "cuda":
        # No CUDA kernel but flash takes grouped queries, and the fallback would hold all scores.
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)


def suffix_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence.

    Args:
        q: [B, N, T, H], the last T tokens of those of `k`.
        k: [B, K, P, H], P at least T.
        v: the same shape.

    Returns:
        [B, N, T, H]. The flash kernel skips what the mask hides: its causal mask is that of the last tokens
        (FlashAttention 2.1). Other devices and dtypes get a mask of [T, P].
    """
    grouped = q.shape[1] != k.shape[1]
    tokens, keys, head = q.shape[2], k.shape[2], q.shape[3]
    if tokens == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if takes_flash(q):
        q, k, v = pad_heads(q, k, v)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        result: Tensor = flash(q, k, v, 0.0, True, scale=head**-0.5)[0]
        return result.narrow(-1, 0, head)
    mask = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
    return masked_attention(q, k, v, mask)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each head of [B, K, S, H] several times, side by side: [B, heads, S, H]."""
    times = heads // x.shape[1]
    return x.repeat_interleave(times, dim=1) if times > 1 else x


def with_equal_heads(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by a kernel that takes one size of heads only: zeros fill up the smaller ones."""
    keys, values = q.shape[-1], v.shape[-1]
    if keys == values:
        return attend(q, k, v)
    if keys < values:
        # What computes divides scores by the square root of the size that it sees.
        q, k = (F.pad(x, (0, values - keys)) for x in (q * (values / keys) ** 0.5, k))
    else:
        v = F.pad(v, (0, keys - values))
    return attend(q, k, v)[..., :values]
