"""The transformer: GPT-2/3 and Llama blocks. It knows nothing of parallelism.

Shapes: B micro batch, S sequence, D model width, N heads, K key/value heads, H head size, V padded
vocabulary. Under tensor parallelism the same code runs on local slices (N/tp heads, V/tp entries), under
context parallelism on S/cp positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec

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


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, H] of rotary positions (RoFormer, arXiv:2104.09864, eq. 34), in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = torch.outer(positions.float(), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to `x` [B, N, S, H], halves rotated as in Llama."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


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
            x = x + self.positions(at.unsqueeze(0))
        return x


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention of [B, N, S, H] queries over [B, K, S, H] keys and values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Multi-head attention with grouped queries: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        qkv_bias = spec.linear_bias or spec.qkv_bias
        self.query = nn.Linear(spec.hidden, spec.q_size, bias=qkv_bias)
        self.key = nn.Linear(spec.hidden, spec.kv_size, bias=qkv_bias)
        self.value = nn.Linear(spec.hidden, spec.kv_size, bias=qkv_bias)
        self.output = nn.Linear(spec.q_size, spec.hidden, bias=spec.linear_bias)
        self.core = CoreAttention()
        self.head_dim = spec.head_dim
        self.rope_theta = spec.rope_theta if spec.position == "rope" else None
        self.rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.rope_theta is not None:
            tables = self.rotary
            if tables is None:
                tables = rotary_table(first_positions(seq, x.device), self.head_dim, self.rope_theta)
            cos, sin = tables
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = self.core(q, k, v).transpose(1, 2).reshape(batch, seq, -1)
        result: Tensor = self.output(attended)
        return result


class Activation(nn.Module):
    """What stands between the matrices of an MLP: f(up), or f(gate) x up."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.function = ACTIVATIONS[spec.activation]

    def forward(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.function(up) if gate is None else self.function(gate) * up


class MLP(nn.Module):
    """Feed-forward network, gated (SwiGLU) or not: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=spec.linear_bias)
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=spec.linear_bias) if spec.gated else None
        self.activation = Activation(spec)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=spec.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = (
            self.activation(self.up(x)) if self.gate is None else self.activation(self.up(x), self.gate(x))
        )
        result: Tensor = self.down(inner)
        return result


class Block(nn.Module):
    """One pre-norm transformer layer: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.mlp_norm = make_norm(spec)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
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
        self.layers = nn.ModuleDict({str(index): Block(spec) for index in layers})
        self.norm = make_norm(spec) if with_head else None
        self.head = nn.Linear(spec.hidden, padded_vocab, bias=False) if with_head else None
        self.tied = spec.tied
        self.tie()

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [block for block in self.layers.values() if isinstance(block, Block)]

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
            if attention.rope_theta is not None:
                tables = tables or rotary_table(positions, attention.head_dim, attention.rope_theta)
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
