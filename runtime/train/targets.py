"""What is predicted: the next token of each position and, with multi-token prediction, those after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.data.boundaries import Boundaries

NO_TOKEN = -1
"""A target beyond the end of a sample: none is predicted."""


def next_tokens(batch: Tensor, boundaries: Boundaries | None, hidden: Tensor | None) -> Tensor:
    """The ids that come next, [B, S]; where they are not to be predicted, what Python's ~ makes of them.

    Args:
        batch: ids of samples, [B, S + 1].
        hidden: tokens of prompts and padding, [B, S + 1], if there are any.
    """
    labels = batch[:, 1:]
    if boundaries is not None and boundaries.eod_mask_loss:
        labels = torch.where(batch[:, :-1] == boundaries.eod, ~labels, labels)
    if hidden is not None:
        labels = torch.where(hidden[:, 1:] & (labels >= 0), ~labels, labels)
    return labels


def targets_of(labels: Tensor, positions: Tensor, depths: int) -> Tensor:
    """What is predicted at `positions` of `next_tokens`: [B, s], or [B, 1 + depths, s] with further tokens.

    A token is predicted at all depths or at none (as Megatron-LM rolls its mask of losses), and nothing comes
    after the end of a sample.
    """
    if not depths:
        return labels[:, positions]
    longer = F.pad(labels, (0, depths), value=NO_TOKEN)
    return torch.stack([longer[:, positions + depth] for depth in range(1 + depths)], dim=1)


def predicted_tokens(labels: Tensor, depths: int) -> Tensor:
    """How many tokens of `next_tokens` are predicted at each depth, [1 + depths] in fp64."""
    return torch.stack([(labels[:, depth:] >= 0).sum() for depth in range(1 + depths)]).double()
