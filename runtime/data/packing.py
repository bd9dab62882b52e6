"""Whole documents packed into samples of a fixed length, for fine-tuning on prompts and answers.

Ids of tokens that are read but not predicted, such as those of prompts, are stored as their complement ~id,
which is negative. Documents end as in their file, regardless of their tokens, as the end-of-turn token often
is the end-of-document token too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.samples import rows_of

PADDING = ~0
"""The id of padding tokens; every model has this id, and it is not predicted."""


def packed_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Documents of each row: the longest documents first, each into the fullest row with room for it.

    A document longer than `capacity` has a row of its own, which holds its beginning. A document without
    tokens has no row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = min(lengths[number], capacity)
        if not length:
            continue
        place = bisect_left(room, (length, -1))
        left, row = room.pop(place) if place < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left > length:
            insort(room, (left - length, row))
    return rows


def documents_of(indexed: IndexedDataset, sequences: range) -> list[range]:
    """The documents of some sequences, each with its sequences."""
    ends = indexed.document_indices.clip(sequences.start, sequences.stop).tolist()
    return [range(begin, end) for begin, end in pairwise(ends) if begin < end]


class PackedDataset:
    """Samples of `seq` + 1 tokens that hold whole documents, and padding that is not predicted.

    Rows are the same in every epoch, in a new order; samples continue without end.
    """

    def __init__(self, indexed: IndexedDataset, sequences: range, seq: int, seed: int) -> None:
        self.indexed, self.seq, self.seed = indexed, seq, seed
        self.documents = documents_of(indexed, sequences)
        self.lengths = [
            min(seq + 1, int(indexed.lengths[document.start : document.stop].sum(dtype=np.int64)))
            for document in self.documents
        ]
        """Tokens of each document that a sample has room for."""
        self.rows = packed_rows(self.lengths, seq + 1)
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """The number of samples of an epoch."""
        return len(self.rows)

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """The tokens at a position of the order, int64[seq + 1]; negative tokens are not predicted."""
        row = np.full(self.seq + 1, PADDING, np.int64)
        at = 0
        for number in self._row(position):
            parts = [self.indexed.get(sequence, 0, None) for sequence in self.documents[number]]
            end = at + self.lengths[number]
            row[at:end] = np.concatenate(parts)[: self.lengths[number]]
            at = end
        return row

    def starts(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Start of the document of each token, as a position in the sample, int64[len(positions), seq + 1].

        Padding belongs to no document: each of its tokens stands alone.
        """
        starts = np.tile(np.arange(self.seq + 1, dtype=np.int64), (len(positions), 1))
        for row, position in zip(starts, positions, strict=True):
            at = 0
            for number in self._row(position):
                end = at + self.lengths[number]
                row[at:end] = at
                at = end
        return starts

    def _row(self, position: int) -> list[int]:
        """The documents of the sample at a position of the order."""
        epoch, place = divmod(position, len(self.rows))
        if self._order is None or self._order[0] != epoch:
            random = np.random.RandomState((self.seed + epoch) % 2**32)
            self._order = epoch, random.permutation(len(self.rows))
        return self.rows[int(self._order[1][place])]

    def batch(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """The samples at some positions, int64[len(positions), seq + 1]."""
        return rows_of(self, positions)


def with_prompts(samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The ids of samples, with those of prompts and padding made positive."""
    result: npt.NDArray[np.int64] = np.where(samples < 0, ~samples, samples)
    return result
