"""The transformer: blocks of GPT, Llama, Qwen, Mixtral and DeepSeek. It knows nothing of parallelism.

Shapes: see `runtime.model`. Under tensor parallelism the same code runs on local slices (N/tp heads, V/tp
entries), under context parallelism on S/cp positions.
"""

from __future__ import annotations

from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.model.attention import Attention, Heads, LatentAttention
from runtime.model.attention_kernels import DocumentMasks
from runtime.model.experts import MixtureOfExperts, Router
from runtime.model.mlp import MLP
from runtime.model.rotary import first_positions


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

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.tokens(tokens_BS)
        if self.positions is not None:
            at = first_positions(tokens_BS.shape[1], tokens_BS.device) if self.at is None else self.at
            # Positions of [S] are those of every row, of [B, S] each row's own.
            x_BSD = x_BSD + self.positions(at if at.dim() == 2 else at.unsqueeze(0))
        return x_BSD


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

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        result_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return result_BSD

    def up_to_core(self, x_BSD: Tensor) -> Heads:
        """Queries, keys and values for the core of attention, from the input of the layer."""
        return self.attention.enter(self.attention_norm(x_BSD))

    def from_core(self, x_BSD: Tensor, attended_BNSH: Tensor) -> Tensor:
        """The output [B, S, D] of the layer with the input `x_BSD`, from what the core of attention gave."""
        # Not shared with `forward`: torch.compile cannot stop for experts in a function that this calls.
        x_BSD = x_BSD + self.attention.merge(attended_BNSH)
        result_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return result_BSD


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

    def place(self, positions_S: Tensor) -> None:
        """Tell the model which positions its tokens have; without it, the first ones in order.

        Rotary tables are made here, once for all layers, so that compiled layers need not make them.
        """
        if self.embedding is not None:
            self.embedding.at = positions_S
        tables = None
        for attention in (block.attention for block in self.blocks):
            if attention.rotates:
                tables = tables or attention.make_rotary(positions_S)
                attention.rotary = tables

    def run_layers(self, x_BSD: Tensor) -> Tensor:
        """All layers, one after the other: [B, S, D] -> [B, S, D]."""
        for block in self.layers.values():
            x_BSD = block(x_BSD)
        return x_BSD

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.run_layers(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
