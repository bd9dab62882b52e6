"""Attention and positions within documents (Megatron-LM's `_get_ltor_masks_and_position_ids`).

One sample has parts of several documents, or several whole ones. Before each pass of a microbatch, stages get
the starts of its documents: the cores of attention get a mask, the embedding and rotary tables get positions.
Backward needs the same for recomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime.data.boundaries import Boundaries
from runtime.model.attention import MakeTables, Tables
from runtime.model.number_formats import DTYPES
from runtime.model.reach import EVERYTHING, Reach
from runtime.model.transformer import Transformer
from runtime.parallel.context import local_positions
from runtime.settings.job_rules import NO_MASK


def check_boundaries(boundaries: Boundaries, layout: Layout) -> None:
    """Raise `InputError` where `layout` cannot keep attention within documents."""
    if (
        boundaries.reset_attention_mask
        and layout.context_parallel > 1
        and layout.context_parallel_form == "ring"
    ):
        raise InputError(NO_MASK)


def document_starts(tokens_BS: Tensor, eod: int) -> Tensor:
    """The start of each token's document, as a position in its row, [B, S].

    In a stream, documents are separated only by the end-of-document token, which belongs to the document that
    it ends.
    """
    at_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    begins_BS = torch.zeros_like(tokens_BS)
    begins_BS[:, 1:] = torch.where(tokens_BS[:, :-1] == eod, at_S[1:], 0)
    return begins_BS.cummax(dim=1).values


def document_mask(
    starts_BS: Tensor, queries_T: Tensor, keys: int, dtype: torch.dtype, reach: Reach = EVERYTHING
) -> Tensor:
    """The document mask [B, 1, T, P] that attention with a reach adds to scores: 0, or -inf for hidden
    tokens.

    Args:
        starts_BS: the position at which the document of each token begins.
        queries_T: the positions of the queries.
        keys: P, the keys are those of the first P positions.
    """
    return reach.mask(queries_T, keys, dtype, starts_BS[:, queries_T]).unsqueeze(1)


class Documents:
    """The documents of the running batch of one data-parallel rank."""

    def __init__(
        self, boundaries: Boundaries, spec: ModelSpec, layout: Layout, cp_rank: int, device: torch.device
    ) -> None:
        self.boundaries, self.seq = boundaries, spec.seq
        self.micro_batch_size, self.dtype = layout.micro_batch_size, DTYPES[layout.precision]
        self.positions = local_positions(spec, layout, cp_rank).to(device)
        """Positions of the tokens that this rank holds, [s]."""
        self.is_gathered = layout.context_parallel > 1 and layout.context_parallel_form == "all_gather"
        self.starts: tuple[Tensor, ...] = ()
        self.masks: tuple[int, dict[Reach, tuple[Tensor, ...]]] = (-1, {})
        """The microbatch that has run last, and its masks: all stages of a rank share them."""
        self.tables: dict[MakeTables, Tables] = {}

    def start_batch(self, starts: Tensor) -> None:
        """Set the start of each token's document for a batch, [microbatches x B, S]."""
        self.starts = torch.split(starts, self.micro_batch_size)
        self.masks = (-1, {})

    def enter(self, stage: Transformer, number: int) -> None:
        """Prepare `stage` for a pass of microbatch `number`, forward or backward."""
        starts = self.starts[number]
        if self.boundaries.reset_attention_mask:
            if self.masks[0] != number:
                self.masks = number, {}
            for reach, held in stage.documents.items():
                held.masks = self._masks(starts, reach)
        if self.boundaries.reset_position_ids:
            self._place(stage, self.positions - starts[:, self.positions])

    def _masks(self, starts: Tensor, reach: Reach) -> tuple[Tensor, ...]:
        """The masks of layers with a reach, shared by all layers with the same reach."""
        seen = reach._replace(softcap=0.0) if reach.binds(self.seq) else EVERYTHING
        made = self.masks[1]
        if seen not in made:
            # Attention that gathers keys has two parts of the sequence. Else it sees the whole one, after an
            # exchange of heads under context parallelism.
            whole = torch.arange(self.seq, device=starts.device)
            parts = self.positions.chunk(2) if self.is_gathered else (whole,)
            made[seen] = tuple(
                document_mask(starts, part, int(part[-1]) + 1, self.dtype, seen) for part in parts
            )
        return made[seen]

    def _place(self, stage: Transformer, at_Bs: Tensor) -> None:
        """Give the tokens of `stage` the positions `at_Bs`."""
        if stage.embedding is not None:
            stage.embedding.at = at_Bs

        def tables(make: MakeTables) -> Tables:
            if make not in self.tables:
                self.tables[make] = make(torch.arange(self.seq, device=at_Bs.device))
            return tuple(table[at_Bs].unsqueeze(1) for table in self.tables[make])

        stage.turn(tables)
