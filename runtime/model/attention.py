"""Attention of a layer: grouped queries and latent attention, both around one core.

Shapes: see `runtime.model`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import LatentAttention as LatentSizes
from costmodels import ModelSpec
from costmodels.spec.model_parts import AttentionKind, RopeScaling
from runtime.model.attention_kernels import DocumentMasks, equal_heads_attention, masked_attention
from runtime.model.fused_attention import reaching_attention
from runtime.model.norms import rms_norm
from runtime.model.reach import EVERYTHING, Reach
from runtime.model.rotary import first_positions, rotary_table, rotate, score_factor

Tables = tuple[Tensor, ...]
"""Tables of positions for a layer: cosines and sines, [S, H] each, or one factor of queries, [S, 1].

With different positions for each row, the shapes have [B, 1] in front.
"""


class MakeRotary(NamedTuple):
    """A maker of rotary tables for a layer's heads; layers with equal rotations share their tables."""

    dim: int
    theta: float
    scaling: RopeScaling | None

    def __call__(self, positions_S: Tensor) -> Tables:
        """Cosines and sines of these positions."""
        return rotary_table(positions_S, self.dim, self.theta, self.scaling)


class MakeGrowth(NamedTuple):
    """A maker of the factors by which attention scores grow with positions (`ScoreGrowth`)."""

    positions: int
    factor: float

    def __call__(self, positions_S: Tensor) -> Tables:
        """The factor of queries at these positions."""
        past_S1 = torch.floor((positions_S.float() + 1.0) / self.positions).unsqueeze(-1)
        return (1.0 + self.factor * torch.log1p(past_S1),)


MakeTables = MakeRotary | MakeGrowth


OverRanks = Callable[[Tensor, Tensor, Tensor, DocumentMasks, Tensor | None], Tensor]
"""The core of attention over sequences split over ranks, as a function of queries, keys, values, masks and
sinks [N]."""


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, N, S, H], and keys and values [B, K, S, H]."""


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention of [B, N, S, H] queries over [B, K, S, H] keys and values.

    Heads of values, and so results, may have another size than those of queries and keys.

    Args:
        reach: limits on the earlier tokens that a token sees.
        sinks: number of heads with a sink; 0 for none.
    """

    def __init__(self, reach: Reach = EVERYTHING, sinks: int = 0) -> None:
        super().__init__()
        self.documents = DocumentMasks()
        self.over_ranks: OverRanks | None = None
        """Attention over sequences that ranks share (`runtime.parallel.context`)."""
        self.reach, self.is_plain = reach, reach == EVERYTHING and not sinks
        self.steps = reach.softcap > 0
        """The layer goes through a sequence step by step: longer sequences take more operations."""
        self.sinks = nn.Parameter(torch.empty(sinks)) if sinks else None

    def own_sinks(self) -> Tensor | None:
        """The sinks [N] of this rank's heads."""
        return self.sinks

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        if self.over_ranks is not None:
            return self.over_ranks(q_BNSH, k_BKSH, v_BKSH, self.documents, self.own_sinks())
        if not self.is_plain and (self.sinks is not None or not self.reach.is_everything(k_BKSH.shape[2])):
            mask_B1TP = self.documents.masks[0] if self.documents.masks else None
            return reaching_attention(q_BNSH, k_BKSH, v_BKSH, self.reach, self.own_sinks(), mask_B1TP)
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
    rotates: bool
    make_tables: MakeTables | None
    """The maker of position tables; None for a layer without positions."""
    tables: Tables | None

    def __init__(self, reach: Reach = EVERYTHING, sinks: int = 0) -> None:
        super().__init__()
        self.core = CoreAttention(reach, sinks)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.merge(self.core(*self.heads(x_BSD)), x_BSD)

    def position_tables(self, seq: int, device: torch.device) -> Tables:
        """Tables of the layer: those given to the model, or those of the first `seq` positions."""
        assert self.make_tables is not None
        return self.tables or self.make_tables(first_positions(seq, device))

    @abstractmethod
    def heads(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the core for the layer's input: queries [B, N, S, H], keys and values [B, K, S, H]."""

    def enter(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """The heads for the input of `forward`, which may be split over ranks."""
        return self.heads(x_BSD)

    def merge(self, attended_BNSH: Tensor, x_BSD: Tensor) -> Tensor:
        """The combined output of all heads: [B, N, S, H] -> [B, S, D]; the input may gate it."""
        result_BSD: Tensor = self.output(attended_BNSH.transpose(1, 2).flatten(2))
        return result_BSD


class Attention(MultiHeadAttention):
    """Multi-head attention with grouped queries, for one kind of layer: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, kind: AttentionKind = "full") -> None:
        reach = Reach(
            spec.window * (kind == "window"), spec.window * (kind == "chunk"), spec.attention_softcap
        )
        super().__init__(reach, spec.heads * spec.attention_sinks)
        qkv_bias = spec.linear_bias or spec.qkv_bias
        self.query = nn.Linear(spec.hidden, spec.q_size, bias=qkv_bias)
        self.key = nn.Linear(spec.hidden, spec.kv_size, bias=qkv_bias)
        self.value = nn.Linear(spec.hidden, spec.kv_size, bias=qkv_bias)
        self.norms_all = spec.qk_norm_width == "all"
        """Norms go over all heads together."""
        widths = (spec.q_size, spec.kv_size) if self.norms_all else (spec.head_dim, spec.head_dim)
        has_norms, weights = spec.norms_heads(kind), spec.qk_norm_weights
        self.query_norm = rms_norm(spec, widths[0], weights) if has_norms else None
        self.key_norm = rms_norm(spec, widths[1], weights) if has_norms else None
        self.gate = nn.Linear(spec.hidden, spec.q_size, bias=qkv_bias) if spec.attention_gate else None
        self.output = nn.Linear(spec.q_size, spec.hidden, bias=spec.linear_bias or spec.output_bias)
        self.head_dim = spec.head_dim
        self.score_factor = spec.score_scale * spec.head_dim**0.5 or 1.0
        turned_by, growth = spec.turned_by(kind), spec.score_growth
        self.rotates, self.grows = turned_by is not None, turned_by is None and growth is not None
        self.make_tables = None
        if turned_by is not None:
            self.make_tables = MakeRotary(spec.rotary_dim or spec.head_dim, *turned_by)
        elif growth is not None:
            self.make_tables = MakeGrowth(growth.positions, growth.factor)
        self.tables = None

    def heads(self, x_BSD: Tensor) -> Heads:
        batch, seq = x_BSD.shape[:2]
        # One name for each through all its shapes: a second one would keep the tensor before alive.
        q, k, v = (projection(x_BSD) for projection in (self.query, self.key, self.value))
        if self.norms_all:
            q, k = self.normalised(q, k)
        q, k, v = (heads.view(batch, seq, -1, self.head_dim) for heads in (q, k, v))
        if not self.norms_all:
            q, k = self.normalised(q, k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if self.rotates:
            cos, sin = self.position_tables(seq, x_BSD.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        elif self.grows:
            (growth,) = self.position_tables(seq, x_BSD.device)
            q = (q * growth).to(q.dtype)
        if self.score_factor != 1.0:
            q = q * self.score_factor
        return q, k, v

    def merge(self, attended_BNSH: Tensor, x_BSD: Tensor) -> Tensor:
        """The combined output of all heads, with each element scaled by the input if there is a gate."""
        if self.gate is None:
            return super().merge(attended_BNSH, x_BSD)
        gated_BSQ = attended_BNSH.transpose(1, 2).flatten(2) * self.gate(x_BSD).sigmoid()
        result_BSD: Tensor = self.output(gated_BSQ)
        return result_BSD

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, if the model has these."""
        if self.query_norm is None or self.key_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)


class Compression(nn.Module):
    """Compressed tokens [B, S, D] of latent attention, before heads: [B, S, Q], [B, S, C] and [B, S, r].

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
        self.make_tables = MakeRotary(rope, spec.rope_theta, spec.rope_scaling) if self.rotates else None
        self.tables = None

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
            cos, sin = self.position_tables(seq, x_BSD.device)
            q_BNSU, q_BNSr = q.split((self.nope, self.rope), dim=-1)
            q = torch.cat((q_BNSU, rotate(q_BNSr, cos, sin)), dim=-1)
            k_rope = rotate(k_rope, cos, sin)
        if self.score_factor != 1.0:
            q = q * self.score_factor
        k = torch.cat((k_BNSU, k_rope.expand(-1, k_BNSU.shape[1], -1, -1)), dim=-1)
        return q, k, v
