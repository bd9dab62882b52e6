"""The order in which context-parallel ranks hold the tokens of a sequence, which shares out causal attention.

Later tokens attend to more keys. A sequence is cut in 2 cp chunks, and rank i holds chunks i and
2 cp - 1 - i: all ranks do equal work (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rank_order(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Whole sequences along `dim`, the chunks of each rank together, rank after rank."""
    if ranks == 1:
        return x
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[place] for rank in range(ranks) for place in (rank, -1 - rank)], dim)


def sequence_order(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Whole sequences along `dim` that are in `rank_order`, in the order of their positions again."""
    if ranks == 1:
        return x
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)
