"""The transformer: blocks of GPT, Llama, Qwen, Mixtral and DeepSeek. It knows nothing of parallelism.

Shapes: B micro batch, S sequence, D model width, N heads, K key/value heads, H head size, V padded
vocabulary, E experts, k experts of a token, F inner width of an expert. Under tensor parallelism the same
code runs on local slices (N/tp heads, V/tp entries), under context parallelism on S/cp positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import LatentAttention as LatentSizes
from costmodels import ModelSpec
from runtime.context_attention import DocumentMasks, masked_attention
from runtime.rotary import rotary_table, rotate, score_factor
from runtime.routing import (
    Dispatch,
    LocalDispatch,
    capacity,
    grouped_linear,
    rows_of_each,
    takes_grouped,
    wide_product,
    within_capacity,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


@lru_cache(maxsize=8)
def first_positions(seq: int, device: torch.device) -> Tensor:
    """The positions 0 to `seq` - 1, [S]."""
    return torch.arange(seq, device=device)


def make_norm(spec: ModelSpec) -> nn.Module:
    """The model's norm of width D."""
    kind = nn.LayerNorm if spec.norm == "layernorm" else nn.RMSNorm
    return kind(spec.hidden, eps=spec.norm_eps)


class Embedding(nn.Module):
    """Token and, where the model learns them, position embeddings: [B, S] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, padded_vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(padded_vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_positions, spec.hidden) if spec.position == "learned" else None
        self.at: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            at = first_positions(tokens.shape[1], tokens.device) if self.at is None else self.at
            # Positions of [S] are those of every row, of [B, S] each row's own.
            x = x + self.positions(at if at.dim() == 2 else at.unsqueeze(0))
        return x


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention of [B, N, S, H] queries over [B, K, S, H] keys and values.

    Heads of values may have another size than those of queries and keys, and results have theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.documents = DocumentMasks()
        self.over_ranks: Callable[[Tensor, Tensor, Tensor, DocumentMasks], Tensor] | None = None
        """Attention over sequences that ranks share (`runtime.context_parallel`)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.over_ranks is not None:
            return self.over_ranks(q, k, v, self.documents)
        if self.documents.masks:
            return with_equal_heads(partial(masked_attention, mask=self.documents.masks[0]), q, k, v)
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        # The CPU's flash kernel takes one size of heads only, and without it all scores are kept.
        return with_equal_heads(attend, q, k, v) if q.device.type == "cpu" else attend(q, k, v)


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


Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, [S, H] each, or [B, 1, S, H] where rows have positions of their own."""

MakeRotary = Callable[[Tensor], Rotary]
"""Tables of positions [S]."""


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, N, S, H], and keys and values [B, K, S, H]."""


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


class Activation(nn.Module):
    """What stands between the matrices of an MLP: f(up), or f(gate) x up."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.function = ACTIVATIONS[spec.activation]

    def forward(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.function(up) if gate is None else self.function(gate) * up


class MLP(nn.Module):
    """Feed-forward network, gated (SwiGLU) or not, of inner width `width`: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, width, bias=spec.linear_bias)
        self.gate = nn.Linear(spec.hidden, width, bias=spec.linear_bias) if spec.gated else None
        self.activation = Activation(spec)
        self.down = nn.Linear(width, spec.hidden, bias=spec.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = (
            self.activation(self.up(x)) if self.gate is None else self.activation(self.up(x), self.gate(x))
        )
        result: Tensor = self.down(inner)
        return result


class Router(nn.Module):
    """Chooses the experts of each token: [B, S, D] -> weights [B, S, k] and numbers of experts [B, S, k].

    Computes in fp32. Of a sequence that fills an expert beyond its capacity, the smallest weights are
    dropped: their weight is zero, and their expert has the number E. The weights of a token's other experts
    stay as they are.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.experts, spec.hidden))
        bias = torch.zeros(spec.experts, dtype=torch.float32) if spec.router.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.expert_bias: Tensor | None
        self.top_k, self.options = spec.top_k, spec.router
        self.observe: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
        """Sees logits and scores [B, S, E], choices, weights and which of them an expert takes in [B, S, k]
        (None for all), and returns the weights."""

    def logits(self, x: Tensor) -> Tensor:
        return wide_product(x, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        scores = logits.softmax(-1) if self.options.score == "softmax" else logits.sigmoid()
        # Where the chosen alone share the weights, logits choose, as in Megatron-LM.
        late = self.options.score == "softmax" and self.options.normalised and self.expert_bias is None
        chosen = self.choose((logits if late else scores).detach())
        weights = scores.gather(-1, chosen)
        if self.options.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
        if self.options.scale != 1.0:
            weights = weights * self.options.scale
        kept = None
        if self.options.capacity_factor:
            kept = self.within_capacity(weights.detach(), chosen)
        if self.observe is not None:
            weights = self.observe(logits, scores, chosen, weights, kept)
        if kept is not None:
            weights = weights.masked_fill(~kept, 0.0)
            chosen = chosen.masked_fill(~kept, scores.shape[-1])
        return weights, chosen

    def to_device(self, device: torch.device) -> None:
        """Move the biases, which are no parameters, to where routing computes."""
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.to(device)

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token, [B, S, k], by scores or logits [B, S, E] and biases."""
        options = self.options
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if options.groups > 1:
            grouped = scores.view(*scores.shape[:-1], options.groups, -1)
            best = grouped.topk(2, -1).values.sum(-1) if options.group_score == "top2" else grouped.amax(-1)
            open_groups = torch.zeros_like(best, dtype=torch.bool)
            open_groups.scatter_(-1, best.topk(options.top_groups, -1).indices, True)
            scores = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.top_k, -1).indices

    def within_capacity(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """Which pairs of whole sequences their experts take in: [B, S, k] booleans."""
        experts = self.weight.shape[0]
        limit = capacity(weights.shape[1], self.top_k, experts, self.options.capacity_factor)
        return within_capacity(weights, chosen, experts, limit)


SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by: sigmoids may all be zero (DeepSeek-V3)."""


class Experts(nn.Module):
    """The experts' networks, stacked: rows [R, D] sorted by expert, and counts [E] -> [R, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts, hidden, width = spec.experts, spec.hidden, spec.expert_ffn
        self.width = width
        """Inner width of the part of an expert that is here."""
        shapes = {"up": (width, hidden), "gate": (width, hidden), "down": (hidden, width)}
        for name, shape in shapes.items():
            used = name != "gate" or spec.gated
            weight = nn.Parameter(torch.empty(experts, *shape)) if used else None
            bias = nn.Parameter(torch.empty(experts, shape[0])) if used and spec.linear_bias else None
            self.register_parameter(name, weight)
            self.register_parameter(f"{name}_bias", bias)
        self.activation = Activation(spec)

    def product(self, name: str, rows: Tensor, counts: Tensor, sizes: list[int] | None) -> Tensor:
        """The linear layer `name` of each expert on its rows."""
        return grouped_linear(rows, getattr(self, name), counts, getattr(self, f"{name}_bias"), sizes)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        sizes = None if takes_grouped(rows, rows.shape[1], self.width) else rows_of_each(rows, counts)
        inner = [self.product("up", rows, counts, sizes)]
        if self.gate is not None:
            inner.append(self.product("gate", rows, counts, sizes))
        return self.product("down", self.activation(*inner), counts, sizes)


class MixtureOfExperts(nn.Module):
    """Experts of which each token uses a few, and shared ones that all use: [B, S, D] -> [B, S, D].

    What carries tokens to experts may take its time while the shared experts compute.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec)
        self.shared = MLP(spec, spec.shared_expert_ffn) if spec.shared_expert_ffn else None
        self.shared_gate = nn.Linear(spec.hidden, 1, bias=False) if spec.shared_expert_gate else None
        self.dispatch: Dispatch = LocalDispatch(spec.experts, drops=bool(spec.router.capacity_factor))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        sent = self.dispatch.send(x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1))
        shared = None if self.shared is None else self.shared(x)
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        rows, counts = self.dispatch.receive(sent)
        result = self.dispatch.give_back(sent, self.experts(rows, counts)).view_as(x)
        return result if shared is None else result + shared


class Block(nn.Module):
    """One pre-norm transformer layer: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        latent = spec.latent_attention
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec) if latent is None else LatentAttention(spec, latent)
        self.mlp_norm = make_norm(spec)
        routed = spec.experts and layer >= spec.dense_layers
        self.mlp = MixtureOfExperts(spec) if routed else MLP(spec, spec.ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result

    def up_to_core(self, x: Tensor) -> Heads:
        """What comes before the core of attention."""
        return self.attention.enter(self.attention_norm(x))

    def from_core(self, x: Tensor, attended: Tensor) -> Tensor:
        """What comes after it: `x` is the input of the layer, and `attended` [B, N, S, H]."""
        # Not shared with `forward`: torch.compile cannot stop for experts in a function that this calls.
        x = x + self.attention.merge(attended)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Transformer(nn.Module):
    """The layers `layers` of a model; embedding and head only where asked (pipeline stages).

    Maps tokens [B, S] or, without the embedding, activations [B, S, D] to logits [B, S, V] or, without
    the head, activations. Parameters keep their names in the whole model whatever the stage.
    """

    def __init__(
        self,
        spec: ModelSpec,
        padded_vocab: int,
        layers: range | None = None,
        with_embedding: bool = True,
        with_head: bool = True,
    ) -> None:
        super().__init__()
        layers = range(spec.layers) if layers is None else layers
        self.embedding = Embedding(spec, padded_vocab) if with_embedding else None
        self.layers = nn.ModuleDict({str(index): Block(spec, index) for index in layers})
        self.norm = make_norm(spec) if with_head else None
        self.head = nn.Linear(spec.hidden, padded_vocab, bias=False) if with_head else None
        self.tied = spec.tied
        self.documents = DocumentMasks()
        """Shared by all layers."""
        for block in self.blocks:
            block.attention.core.documents = self.documents
        self.tie()

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [block for block in self.layers.values() if isinstance(block, Block)]

    @property
    def routers(self) -> dict[int, Router]:
        """Routers by the number of their layer."""
        return {
            int(index): block.mlp.router
            for index, block in self.layers.items()
            if isinstance(block, Block) and isinstance(block.mlp, MixtureOfExperts)
        }

    def tie(self) -> None:
        """Make head and embedding one parameter if the model ties them and both are here."""
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.tokens.weight

    def place(self, positions: Tensor) -> None:
        """Tell the model which positions [S] its tokens have; without it, the first ones in order.

        Rotary tables are made here, once for all layers, so that compiled layers need not make them.
        """
        if self.embedding is not None:
            self.embedding.at = positions
        tables = None
        for attention in (block.attention for block in self.blocks):
            if attention.rotates:
                tables = tables or attention.make_rotary(positions)
                attention.rotary = tables

    def run_layers(self, x: Tensor) -> Tensor:
        """All layers, one after the other: [B, S, D] -> [B, S, D]."""
        for block in self.layers.values():
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.run_layers(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
