"""The transformer: blocks of GPT, Llama, Qwen, Mixtral and DeepSeek. It knows nothing of parallelism.

Shapes: see `runtime.model`. Under tensor parallelism the same code runs on local slices (N/tp heads, V/tp
entries), under context parallelism on S/cp positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.model.adapters import add_adapters
from runtime.model.attention import Attention, LatentAttention, MakeTables, MultiHeadAttention, Tables
from runtime.model.attention_kernels import DocumentMasks
from runtime.model.experts import MixtureOfExperts, Router
from runtime.model.gated_delta import GatedDelta
from runtime.model.mlp import MLP
from runtime.model.multi_token import FurtherToken, Scorer, with_further_losses
from runtime.model.norms import make_norm
from runtime.model.reach import Reach
from runtime.model.rotary import first_positions


class Embedding(nn.Module):
    """Token embeddings, and position embeddings if the model learns them: [B, S] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, padded_vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(padded_vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_positions, spec.hidden) if spec.position == "learned" else None
        self.at: Tensor | None = None
        self.scale = spec.embedding_scale

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.tokens(tokens_BS)
        if self.positions is not None:
            at = first_positions(tokens_BS.shape[1], tokens_BS.device) if self.at is None else self.at
            # Positions of [S] are those of every row, of [B, S] each row's own.
            x_BSD = x_BSD + self.positions(at if at.dim() == 2 else at.unsqueeze(0))
        # Rounded to the format of the embeddings first, as models were trained that have it.
        return x_BSD if self.scale == 1.0 else x_BSD * torch.tensor(self.scale, dtype=x_BSD.dtype).item()


class Block(nn.Module):
    """One transformer layer: [B, S, D] -> [B, S, D]; attention and MLP have norms before or after them.

    The MLP's input is the sum of attention's input and output, or attention's input.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        latent, kind = spec.latent_attention, spec.layer_kind(layer)
        before, after = spec.norm_place != "after", spec.norm_place != "before"
        self.attention_norm = make_norm(spec) if before else None
        self.attention: MultiHeadAttention
        if kind.attention == "linear" and spec.linear_attention is not None:
            self.attention = GatedDelta(spec, spec.linear_attention)
        elif latent is not None:
            self.attention = LatentAttention(spec, latent)
        else:
            self.attention = Attention(spec, kind.attention)
        self.attended_norm = make_norm(spec) if after else None
        self.mlp_norm = make_norm(spec) if before else None
        self.mlp = MixtureOfExperts(spec) if kind.mlp == "experts" else MLP(spec, spec.ffn)
        self.computed_norm = make_norm(spec) if after else None
        self.scale = spec.residual_scale
        self.is_parallel = spec.parallel_residual

    @property
    def norms(self) -> list[nn.Module]:
        """The norms of width D, in the order of forward."""
        every = self.attention_norm, self.attended_norm, self.mlp_norm, self.computed_norm
        return [norm for norm in every if norm is not None]

    def add(self, x_BSD: Tensor, y_BSD: Tensor, norm: nn.Module | None) -> Tensor:
        """The residual `x_BSD` plus the output of attention or MLP, normalised by `norm`."""
        if norm is not None:
            y_BSD = norm(y_BSD)
        return x_BSD + (y_BSD if self.scale == 1.0 else y_BSD * self.scale)

    def forward(self, x_BSD: Tensor) -> Tensor:
        entered_BSD = x_BSD if self.attention_norm is None else self.attention_norm(x_BSD)
        sum_BSD = self.add(x_BSD, self.attention(entered_BSD), self.attended_norm)
        x_BSD = x_BSD if self.is_parallel else sum_BSD
        entered_BSD = x_BSD if self.mlp_norm is None else self.mlp_norm(x_BSD)
        return self.add(sum_BSD, self.mlp(entered_BSD), self.computed_norm)

    def up_to_core(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values for the core of attention, from the input of the layer."""
        return self.attention.enter(x_BSD if self.attention_norm is None else self.attention_norm(x_BSD))

    def from_core(self, x_BSD: Tensor, attended_BNSH: Tensor) -> Tensor:
        """The output [B, S, D] of the layer with input `x_BSD`, from the output of attention's core."""
        # Not shared with `forward`: torch.compile cannot stop for experts in a function that this calls.
        sum_BSD = self.add(x_BSD, self.attention.merge(attended_BNSH, x_BSD), self.attended_norm)
        x_BSD = x_BSD if self.is_parallel else sum_BSD
        entered_BSD = x_BSD if self.mlp_norm is None else self.mlp_norm(x_BSD)
        return self.add(sum_BSD, self.mlp(entered_BSD), self.computed_norm)


class Transformer(nn.Module):
    """The layers `layers` of a model, with embedding and head if requested (pipeline stages).

    Its input is tokens [B, S], or activations [B, S, D] without the embedding. Its output is logits [B, S,
    V], activations without the head, or the result of `score` if that is set. MTP modules are on the stage
    with the head, with a copy of the embedding if the embedding is on another stage. Parameters have their
    names in the whole model on every stage.
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
        blocks = (Block(spec, spec.layers - 1) for _ in range(spec.mtp_depths if with_head else 0))
        self.mtp = nn.ModuleList(FurtherToken(spec, block) for block in blocks)
        self.further_embedding: Embedding | None = None
        """A copy of the embedding for these modules, on another stage than the first."""
        if self.mtp and not with_embedding:
            self.further_embedding = Embedding(spec, padded_vocab)
        if spec.lora is not None:
            self.requires_grad_(False)
            for index, block in self.layers.items():
                kind = spec.layer_kind(int(index))
                alike = spec.model_copy(update={"attention_pattern": (kind.attention,)})
                add_adapters(block, alike, kind.mlp)
        self.score: Scorer | None = None
        """A function of the head and its input whose result, a loss, the model returns instead of logits."""
        self.numbers = [*layers, *range(spec.layers, spec.layers + len(self.mtp))]
        """The layer number of each block in `blocks`; MTP blocks follow the layers of the whole model."""
        self.ends_share = spec.tied or spec.mtp is not None
        self.tied, self.logits_scale, self.softcap = spec.tied, spec.logits_scale, spec.logits_softcap
        self.documents: dict[Reach, DocumentMasks] = {}
        """Shared by all layers of the same reach."""
        for block in self.blocks:
            core = block.attention.core
            core.documents = self.documents.setdefault(core.reach, DocumentMasks())
        self.tie()

    @property
    def stack(self) -> list[Block]:
        """The layers, in order."""
        return [block for block in self.layers.values() if isinstance(block, Block)]

    @property
    def blocks(self) -> list[Block]:
        """The layers of the model and of the MTP modules."""
        further = (module.block for module in self.mtp if isinstance(module, FurtherToken))
        return [*self.stack, *(block for block in further if isinstance(block, Block))]

    @property
    def routers(self) -> dict[int, Router]:
        """Routers by the number of their layer."""
        return {
            index: block.mlp.router
            for index, block in zip(self.numbers, self.blocks, strict=True)
            if isinstance(block.mlp, MixtureOfExperts)
        }

    @property
    def token_table(self) -> Tensor | None:
        """The copy of the token embedding on this stage that another stage, or the head, also trains."""
        if not self.ends_share:
            return None
        for embedding in (self.embedding, self.further_embedding):
            if embedding is not None:
                return embedding.tokens.weight
        return None if self.head is None else self.head.weight

    def tie(self) -> None:
        """Make head and embeddings one parameter if the model ties them and both are on this stage."""
        if not self.tied or self.head is None:
            return
        if self.embedding is not None:
            self.head.weight = self.embedding.tokens.weight
        if self.further_embedding is not None:
            self.further_embedding.tokens.weight = self.head.weight

    def place(self, positions_S: Tensor) -> None:
        """Set the positions of the model's tokens; by default these are the first ones in order.

        Rotary tables are made here, once for all layers, so that compiled layers need not make them.
        """
        if self.embedding is not None:
            self.embedding.at = positions_S
        self.turn(lambda make: make(positions_S))

    def turn(self, tables: Callable[[MakeTables], Tables]) -> None:
        """Give each layer with positions the `tables` of its maker."""
        made: dict[MakeTables, Tables] = {}
        for attention in (block.attention for block in self.blocks):
            make = attention.make_tables
            if make is None:
                continue
            if make not in made:
                made[make] = tables(make)
            attention.tables = made[make]

    def run_layers(self, x_BSD: Tensor) -> Tensor:
        """All layers, one after the other: [B, S, D] -> [B, S, D]."""
        for block in self.layers.values():
            x_BSD = block(x_BSD)
        return x_BSD

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.run_layers(x)
        return x if self.head is None else self.end(x)

    def end(self, x_BSD: Tensor) -> Tensor:
        """Logits from the output of all layers, or the result of `score` instead."""
        assert self.norm is not None and self.head is not None
        x_BSD = self.norm(x_BSD)
        return self.logits(x_BSD) if self.score is None else self._scored(self.head, x_BSD, self.score)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Logits [B, S, V], or this rank's share of V, of the output of the last norm."""
        assert self.head is not None
        logits_BSV = self.head(self._scaled(x_BSD))
        return torch.tanh(logits_BSV / self.softcap) * self.softcap if self.softcap else logits_BSV

    def _scaled(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.logits_scale == 1.0 else x_BSD * self.logits_scale

    def _scored(self, head: nn.Linear, x_BSD: Tensor, score: Scorer) -> Tensor:
        """The loss from the output of the last norm; without MTP in an evaluation."""
        loss = score(head, self._scaled(x_BSD))
        if not self.mtp or not torch.is_grad_enabled():
            return loss
        embed = self.embedding or self.further_embedding
        assert embed is not None

        def of_depth(further_BSD: Tensor, depth: int) -> Tensor:
            return score(head, self._scaled(further_BSD), depth)

        return with_further_losses(loss, x_BSD, list(self.mtp), embed, of_depth, score.further)
