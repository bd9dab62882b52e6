"""Whole documents packed into samples of a fixed length, for fine-tuning on prompts and answers.

Ids of what is read and not predicted, such as a prompt, are stored as their complement, ~id: negative ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.samples import rows_of


def packed_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which documents share a row: the longest first, each into the fullest row that has room for it.

    A document longer than `capacity` has a row of its own, which holds its beginning; one without tokens has
    none.
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


class PackedDataset:
    """Samples of `seq` + 1 tokens that hold whole documents, and padding of ends that are not predicted.

    Rows are the same in every epoch, and shuffled anew in each; samples go on without an end.
    """

    def __init__(
        self, indexed: IndexedDataset, sequences: Sequence[int], seq: int, seed: int, eod: int
    ) -> None:
        self.indexed, self.seq, self.seed, self.eod = indexed, seq, seed, eod
        self.sequences = sequences
        lengths = [int(indexed.lengths[sequence]) for sequence in sequences]
        self.rows = packed_rows(lengths, seq + 1)
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.rows)

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """The tokens at a position of the order, int64[seq + 1]; negative ones are not predicted."""
        epoch, place = divmod(position, len(self.rows))
        if self._order is None or self._order[0] != epoch:
            random = np.random.RandomState((self.seed + epoch) % 2**32)
            self._order = epoch, random.permutation(len(self.rows))
        row = np.full(self.seq + 1, ~self.eod, np.int64)
        at = 0
        for number in self.rows[int(self._order[1][place])]:
            tokens = self.indexed.get(int(self.sequences[number]), 0, None)[: self.seq + 1]
            row[at : at + len(tokens)] = tokens
            at += len(tokens)
        return row

    def batch(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """The samples at some positions, int64[len(positions), seq + 1]."""
        return rows_of(self, positions)


def with_prompts(samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The ids of samples, those of prompts and padding too."""
    result: npt.NDArray[np.int64] = np.where(samples < 0, ~samples, samples)
    return result
