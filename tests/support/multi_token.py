"""Multi-token prediction by its definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels import ModelSpec
from runtime.model.transformer import Transformer


def logits_by_depth(model: Transformer, spec: ModelSpec, batch: Tensor) -> list[Tensor]:
    """Logits [B, S - depth, V] of the next token and of those after it, from ids [B, S + 1].

    Positions without a token so far on are cut. The layers are the model's own, whatever these compute;
    embeddings, joins, norms and heads are not.
    """
    tokens, found = batch[:, :-1], []
    seq, parameter = tokens.shape[1], model.get_parameter
    table = parameter("embedding.tokens.weight")
    head = table if spec.tied else parameter("head.weight")

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (spec.hidden,), parameter(name), spec.norm_eps)

    def logits(x: Tensor, depth: int) -> Tensor:
        return F.linear(x * spec.logits_scale, head)[:, : seq - depth, : spec.vocab]

    x = norm(model.run_layers(F.embedding(tokens, table) * spec.embedding_scale), "norm.weight")
    found.append(logits(x, 0))
    for depth in range(1, spec.mtp_depths + 1):
        name = f"mtp.{depth - 1}."
        # Any token stands for those after the end: what they make of a position reaches no loss.
        ids = F.pad(batch[:, depth:], (0, depth - 1), value=3)
        embedded = norm(F.embedding(ids, table) * spec.embedding_scale, f"{name}token_norm.weight")
        both = torch.cat((embedded, norm(x, f"{name}hidden_norm.weight")), dim=-1)
        block = model.get_submodule(f"{name}block")
        x = norm(block(both @ parameter(f"{name}join.weight").T), f"{name}norm.weight")
        found.append(logits(x, depth))
    return found
