"""Split sequences over context-parallel ranks, and let attention reach across."""

from __future__ import annotations

import torch
from torch import Tensor

from costmodels import Layout, ModelSpec
from runtime.grid import Grid
from runtime.model import Transformer


def local_positions(spec: ModelSpec, layout: Layout, cp_rank: int) -> Tensor:
    """Positions of the sequence that a context-parallel rank holds, [S / cp]."""
    return torch.arange(spec.seq)


def context_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Let the attention of `stage` reach the tokens of all context-parallel ranks."""
