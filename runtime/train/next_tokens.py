"""Targets of training: the next token of each position and, with multi-token prediction, later tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_TOKEN = -1
"""The target beyond the end of a sample, which is not predicted."""


class Batch(NamedTuple):
    """The samples of some rows of a global batch, and their targets."""

    tokens: Tensor
    """Ids, [B, S + 1]."""
    labels: Tensor
    """Labels from `next_tokens`, [B, S]."""
    starts: Tensor | None = None
    """The start position of each token's document, [B, S + 1], if documents matter."""
    is_packed: bool = False
    """True if samples have whole documents."""


def next_tokens(batch: Tensor, starts: Tensor | None, hidden: Tensor | None) -> Tensor:
    """The next ids, [B, S]; ids that are not to be predicted are complemented (Python's ~).

    Args:
        batch: ids of samples, [B, S + 1].
        starts: the start position of each token's document, [B, S + 1]. If given, no token is predicted from
            a token of another document.
        hidden: tokens of prompts and padding, [B, S + 1], if there are any.
    """
    labels = batch[:, 1:]
    if starts is not None:
        labels = torch.where(starts[:, 1:] == starts[:, :-1], labels, ~labels)
    if hidden is not None:
        labels = torch.where(hidden[:, 1:] & (labels >= 0), ~labels, labels)
    return labels


def targets_of(batch: Batch, depths: int) -> Tensor:
    """Targets of each position: [B, S], or [B, 1 + depths, S] with MTP.

    A token is predicted at all depths or at none (as Megatron-LM rolls its mask of losses), and nothing comes
    after the end of a sample. Tokens of packed samples are predicted only from their own document, at all
    depths.
    """
    labels, seq = batch.labels, batch.labels.shape[1]
    if not depths:
        return labels
    longer = F.pad(labels, (0, depths), value=NO_TOKEN)
    every = [longer[:, depth : depth + seq] for depth in range(1 + depths)]
    if batch.is_packed:
        assert batch.starts is not None
        own, later = batch.starts[:, :-1], F.pad(batch.starts[:, 1:], (0, depths), value=NO_TOKEN)
        every = [
            torch.where((later[:, depth : depth + seq] == own) | (ids < 0), ids, ~ids)
            for depth, ids in enumerate(every)
        ]
    return torch.stack(every, dim=1)


def predicted_tokens(targets: Tensor) -> Tensor:
    """Numbers of predicted tokens of `targets_of` at each depth, [1 + depths] in fp64."""
    by_depth = targets if targets.dim() == 3 else targets.unsqueeze(1)
    return (by_depth >= 0).sum((0, 2)).double()
