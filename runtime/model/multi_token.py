"""Multi-token prediction (MTP): modules after the model (DeepSeek-V3, arXiv:2412.19437, section 2.2).

What comes in is what the model makes of its last norm, as Megatron-LM and published inference code of
DeepSeek-V3 have it. Shapes: see `runtime.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.model.norms import make_norm


class Scorer(Protocol):
    """Makes a loss [] of the head and of its input [B, S, D], in the place of logits."""

    def __call__(self, head: nn.Linear, x_BSD: Tensor, depth: int = 0) -> Tensor:
        """The share in the objective of predicting the token `depth` + 1 further on, by the rank's tokens."""

    def further(self, depth: int) -> Tensor:
        """Ids [B, S] of the tokens `depth` further on; any id where the sequence has ended before."""


class FurtherToken(nn.Module):
    """One MTP module, of the last depth's output and embeddings of later tokens, [B, S, D] each."""

    def __init__(self, spec: ModelSpec, block: nn.Module) -> None:
        super().__init__()
        self.token_norm = make_norm(spec)
        self.hidden_norm = make_norm(spec)
        self.join = nn.Linear(2 * spec.hidden, spec.hidden, bias=False)
        self.block = block
        self.norm = make_norm(spec)

    @property
    def norms(self) -> list[nn.Module]:
        """The module's norms of width D, without those of its layer."""
        return [self.token_norm, self.hidden_norm, self.norm]

    def forward(self, x_BSD: Tensor, token_BSD: Tensor) -> Tensor:
        # Published weights have the token first, the other way round than the paper's equation 21.
        joined_BSD = self.join(torch.cat((self.token_norm(token_BSD), self.hidden_norm(x_BSD)), dim=-1))
        result_BSD: Tensor = self.norm(self.block(joined_BSD))
        return result_BSD


def with_further_losses(
    loss: Tensor,
    x_BSD: Tensor,
    modules: Sequence[nn.Module],
    embed: Callable[[Tensor], Tensor],
    score: Callable[[Tensor, int], Tensor],
    further: Callable[[int], Tensor],
) -> Tensor:
    """`loss`, which is what is reported, with the gradients of the losses of all depths besides.

    Args:
        x_BSD: the model after its last norm.
        score: of the input of the head, and the depth.
        further: as `Scorer` has it.
    """
    objective = torch.zeros_like(loss)
    for depth, module in enumerate(modules, start=1):
        x_BSD = module(x_BSD, embed(further(depth)))
        objective = objective + score(x_BSD, depth)
    return loss + (objective - objective.detach())
