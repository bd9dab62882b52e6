"""Attention of a layer: grouped queries and latent attention, both around one core.

Shapes: see `runtime.model`.
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
from runtime.model.attention_kernels import DocumentMasks, equal_heads_attention, masked_attention
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

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        if self.over_ranks is not None:
            return self.over_ranks(q_BNSH, k_BKSH, v_BKSH, self.documents)
        if self.documents.masks:
            attend = partial(masked_attention, mask_B1TP=self.documents.masks[0])
            return equal_heads_attention(attend, q_BNSH, k_BKSH, v_BKSH)
        grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
        # The CPU's flash kernel takes one size of heads only, and without it all scores are kept.
        if q_BNSH.device.type == "cpu":
            return equal_heads_attention(attend, q_BNSH, k_BKSH, v_BKSH)
        return attend(q_BNSH, k_BKSH, v_BKSH)


class MultiHeadAttention(nn.Module, ABC):
    """Multi-head attention: [B, S, D] -> [B, S, D]."""

    output: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.core = CoreAttention()

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BNSH, k_BKSH, v_BKSH = self.heads(x_BSD)
        return self.merge(self.core(q_BNSH, k_BKSH, v_BKSH))

    @abstractmethod
    def heads(self, x_BSD: Tensor) -> Heads:
        """Queries [B, N, S, H], and keys and values [B, K, S, H], of the input."""

    def enter(self, x_BSD: Tensor) -> Heads:
        """The heads of what comes to `forward`, whose input ranks may share."""
        return self.heads(x_BSD)

    def merge(self, attended_BNSH: Tensor) -> Tensor:
        """The result of all heads together: [B, N, S, H] -> [B, S, D]."""
        result_BSD: Tensor = self.output(attended_BNSH.transpose(1, 2).flatten(2))
        return result_BSD


class Attention(MultiHeadAttention):
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

    def heads(self, x_BSD: Tensor) -> Heads:
        batch, seq = x_BSD.shape[:2]
        # One name for each through all its shapes: a second one would keep the tensor before alive.
        q, k, v = (
            projection(x_BSD).view(batch, seq, -1, self.head_dim)
            for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if self.rotates:
            cos, sin = self.rotary or self.make_rotary(first_positions(seq, x_BSD.device))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v


class Compression(nn.Module):
    """Tokens [B, S, D] before latent attention gives them heads: [B, S, Q], [B, S, C] and [B, S, r].

    Q: the compressed query, or the input itself where queries are not compressed; C: the latent of keys and
    values; r: the rotary part of the key, which all heads share (arXiv:2405.04434, section 2.1.2 and 2.1.3).
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

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        latent_BSC, k_BSr = self.latent(x_BSD).split(self.widths[1:], dim=-1)
        q_BSQ = x_BSD
        if self.query is not None and self.query_norm is not None:
            q_BSQ = self.query_norm(self.query(x_BSD))
        return q_BSQ, self.latent_norm(latent_BSC), k_BSr


class LatentAttention(MultiHeadAttention):
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

    def heads(self, x_BSD: Tensor) -> Heads:
        q_BSQ, latent_BSC, k_rope = self.compress(x_BSD)
        batch, seq = q_BSQ.shape[:2]
        q = self.query(q_BSQ).view(batch, seq, -1, self.nope + self.rope).transpose(1, 2)
        kv = self.key_value(latent_BSC).view(batch, seq, -1, self.nope + self.value).transpose(1, 2)
        k_BNSU, v = kv.split((self.nope, self.value), dim=-1)
        # Backward keeps values: a view would keep the keys beside them too.
        v = v.contiguous()
        k_rope = k_rope.unsqueeze(1)
        if self.rotates:
            cos, sin = self.rotary or self.make_rotary(first_positions(seq, x_BSD.device))
            q_BNSU, q_BNSr = q.split((self.nope, self.rope), dim=-1)
            q = torch.cat((q_BNSU, rotate(q_BNSr, cos, sin)), dim=-1)
            k_rope = rotate(k_rope, cos, sin)
        if self.score_factor != 1.0:
            q = q * self.score_factor
        k = torch.cat((k_BNSU, k_rope.expand(-1, k_BNSU.shape[1], -1, -1)), dim=-1)
        return q, k, v
