"""Attention of a layer: grouped queries and latent attention, both around one core.

Shapes: see `runtime.model.transformer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import LatentAttention as LatentSizes
from costmodels import ModelSpec
from runtime.model.attention_kernels import DocumentMasks, masked_attention, with_equal_heads
from runtime.model.rotary import first_positions, rotary_table, rotate, score_factor

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, [S, H] each, or [B, 1, S, H] where rows have positions of their own."""


MakeRotary = Callable[[Tensor], Rotary]
"""Tables of positions [S]."""


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, N, S, H], and keys and values [B, K, S, H]."""


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention of [B, N, S, H] queries over [B, K, S, H] keys and values.

    Heads of values may have another size than those of queries and keys, and results have theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.documents = DocumentMasks()
        self.over_ranks: Callable[[Tensor, Tensor, Tensor, DocumentMasks], Tensor] | None = None
        """Attention over sequences that ranks share (`runtime.parallel.context`)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.over_ranks is not None:
            return self.over_ranks(q, k, v, self.documents)
        if self.documents.masks:
            return with_equal_heads(partial(masked_attention, mask=self.documents.masks[0]), q, k, v)
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        # The CPU's flash kernel takes one size of heads only, and without it all scores are kept.
        return with_equal_heads(attend, q, k, v) if q.device.type == "cpu" else attend(q, k, v)


class AnyAttention(nn.Module, ABC):
    """Multi-head attention: [B, S, D] -> [B, S, D]."""

    output: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.core = CoreAttention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(self.core(q, k, v))

    @abstractmethod
    def heads(self, x: Tensor) -> Heads:
        """What the core attends with."""

    def enter(self, x: Tensor) -> Heads:
        """The same of what comes to `forward`, whose input ranks may share."""
        return self.heads(x)

    def merge(self, attended: Tensor) -> Tensor:
        """What all heads give together: [B, N, S, H] -> [B, S, D]."""
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


class Attention(AnyAttention):
    """Multi-head attention with grouped queries: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        qkv_bias = spec.linear_bias or spec.qkv_bias
        self.query = nn.Linear(spec.hidden, spec.q_size, bias=qkv_bias)
        self.key = nn.Linear(spec.hidden, spec.kv_size, bias=qkv_bias)
        self.value = nn.Linear(spec.hidden, spec.kv_size, bias=qkv_bias)
        self.query_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None
        self.key_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None
        self.output = nn.Linear(spec.q_size, spec.hidden, bias=spec.linear_bias)
        self.head_dim = spec.head_dim
        self.rotates = spec.position == "rope"
        self.make_rotary: MakeRotary = partial(
            rotary_table, dim=spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling
        )
        self.rotary: Rotary | None = None

    def heads(self, x: Tensor) -> Heads:
        batch, seq = x.shape[:2]
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim)
            for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if self.rotates:
            cos, sin = self.rotary or self.make_rotary(first_positions(seq, x.device))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v


class Compression(nn.Module):
    """What latent attention makes of a token [B, S, D] before it has heads: Q, C and R of [B, S, ...].

    Q: the compressed query, or the input itself where queries are not compressed; C: the latent of keys and
    values; R: the rotary part of the key, which all heads share (arXiv:2405.04434, section 2.1.2 and 2.1.3).
    """

    def __init__(self, spec: ModelSpec, sizes: LatentSizes) -> None:
        super().__init__()
        self.query = self.query_norm = None
        if sizes.q_lora_rank:
            self.query = nn.Linear(spec.hidden, sizes.q_lora_rank, bias=False)
            self.query_norm = nn.RMSNorm(sizes.q_lora_rank, eps=spec.norm_eps)
        self.latent = nn.Linear(spec.hidden, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.latent_norm = nn.RMSNorm(sizes.kv_lora_rank, eps=spec.norm_eps)
        self.widths = [sizes.q_lora_rank or spec.hidden, sizes.kv_lora_rank, sizes.qk_rope_head_dim]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        latent, rope = self.latent(x).split(self.widths[1:], dim=-1)
        if self.query is not None and self.query_norm is not None:
            x = self.query_norm(self.query(x))
        return x, self.latent_norm(latent), rope


class LatentAttention(AnyAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, sizes: LatentSizes) -> None:
        super().__init__()
        nope, rope, value = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
        self.compress = Compression(spec, sizes)
        queries, latents, _ = self.compress.widths
        self.query = nn.Linear(queries, spec.heads * (nope + rope), bias=False)
        self.key_value = nn.Linear(latents, spec.heads * (nope + value), bias=False)
        self.output = nn.Linear(spec.heads * value, spec.hidden, bias=spec.linear_bias)
        self.nope, self.rope, self.value = nope, rope, value
        self.score_factor = score_factor(spec.rope_scaling)
        self.rotates = spec.position == "rope"
        self.make_rotary: MakeRotary = partial(
            rotary_table, dim=rope, theta=spec.rope_theta, scaling=spec.rope_scaling
        )
        self.rotary: Rotary | None = None

    def heads(self, x: Tensor) -> Heads:
        queries, latent, k_rope = self.compress(x)
        batch, seq = queries.shape[:2]
        q = self.query(queries).view(batch, seq, -1, self.nope + self.rope).transpose(1, 2)
        kv = self.key_value(latent).view(batch, seq, -1, self.nope + self.value).transpose(1, 2)
        k_nope, v = kv.split((self.nope, self.value), dim=-1)
        # Backward keeps values: a view would keep the keys beside them too.
        v = v.contiguous()
        k_rope = k_rope.unsqueeze(1)
        if self.rotates:
            cos, sin = self.rotary or self.make_rotary(first_positions(seq, x.device))
            q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
            q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
            k_rope = rotate(k_rope, cos, sin)
        if self.score_factor != 1.0:
            q = q * self.score_factor
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        return q, k, v
