"""The order of a sequence's tokens on context-parallel ranks, which balances causal attention.

Later tokens attend to more keys. A sequence is cut into 2 cp chunks, and rank i has chunks i and 2 cp - 1 -
i, so all ranks do equal work (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rank_order(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Whole sequences along `dim`, reordered so that each rank's chunks are together, rank after rank."""
    if ranks == 1:
        return x
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[place] for rank in range(ranks) for place in (rank, -1 - rank)], dim)


def sequence_order(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Whole sequences along `dim`, reordered from `rank_order` to the order of positions."""
    if ranks == 1:
        return x
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)
