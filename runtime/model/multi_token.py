"""Multi-token prediction (MTP): modules after the model (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Their input is the output of the model's last norm, as in Megatron-LM and in DeepSeek-V3's published inference
code. Shapes: see `runtime.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.model.norms import make_norm


class Scorer(Protocol):
    """A function that computes the loss [] from the head and its input [B, S, D], instead of logits."""

    def __call__(self, head: nn.Linear, x_BSD: Tensor, depth: int = 0) -> Tensor:
        """The loss of predicting the token `depth` + 1 positions later, for this rank's tokens, weighted for
        the objective."""

    def further(self, depth: int) -> Tensor:
        """Ids [B, S] of the tokens `depth` positions later; any id beyond the end of the sequence."""


class FurtherToken(nn.Module):
    """One MTP module; its inputs are the last depth's output and the embeddings of later tokens, [B, S, D]
    each."""

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
    """`loss`, which is reported, with the gradients of the losses of all depths added.

    Args:
        x_BSD: output of the model's last norm.
        score: loss function of the head's input and the depth.
        further: as in `Scorer`.
    """
    objective = torch.zeros_like(loss)
    for depth, module in enumerate(modules, start=1):
        x_BSD = module(x_BSD, embed(further(depth)))
        objective = objective + score(x_BSD, depth)
    return loss + (objective - objective.detach())
