"""Fixed-length training samples from documents, in the order of Megatron's GPTDataset.

The documents of all epochs are shuffled and read as one stream. Sample k has the tokens k*seq to (k+1)*seq
inclusive, so consecutive samples share one token. Then the samples are shuffled. The arithmetic and the
random stream are those of megatron/core/datasets/gpt_dataset.py and helpers.cpp. So the same files, seed and
sample count give Megatron's samples. The order depends on nothing else, in particular not on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from costmodels.catalogue.local_machine import available_memory
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from runtime.data.indexed_dataset import IndexedDataset

# A last epoch of which less than this share is used is shuffled apart, so that no document is
# overrepresented early in training.
_FINAL_EPOCH_SHARE = 0.80

BYTES_OF_PLACE = 24
"""Bytes for each document while the order is made: its number twice, its length and its end."""

BYTES_OF_SAMPLE = 36
"""Bytes for each sample: its start and its place as 64-bit numbers, the index, and the shuffled order."""

SMALL = GIB
"""Bytes that fit into any machine, so that memory need not be checked."""


def split_sequences(count: int, split: str) -> tuple[range, range, range]:
    """Sequences of the training, validation and test split: `split` are their weights, as "969,30,1"."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    weights += [0.0] * (3 - len(weights))
    if (
        not split.strip()
        or len(weights) != 3
        or not all(0 <= w < np.inf for w in weights)
        or not sum(weights)
    ):
        raise InputError(
            f"--split {split!r}: expected up to three weights (training, validation, test), as 969,30,1"
        )
    shares = [weight / sum(weights) for weight in weights]
    edges = [0.0, shares[0], shares[0] + shares[1], shares[0] + shares[1] + shares[2]]
    ends = [round(edge * float(count)) for edge in edges]
    train, valid, test = (range(start, stop) for start, stop in pairwise(ends))
    return train, valid, test


@dataclass(frozen=True)
class Epochs:
    """Passes over the documents that fill the samples.

    `count` is the number of epochs; `before_last` samples are complete without the last epoch; `separate` is
    True if the last epoch is shuffled separately.
    """

    count: int
    before_last: int
    separate: bool


def count_epochs(tokens: int, seq: int, samples: int | None) -> Epochs:
    """The fewest epochs of `tokens` that yield `samples` (one epoch if None) of `seq` + 1 tokens."""
    if samples is None:
        return Epochs(1, 0, False)
    count = max(1, -(-(samples * seq + 1) // tokens))
    before_last = ((count - 1) * tokens - 1) // seq
    per_epoch = (tokens - 1) // seq
    separate = count > 1 and samples - before_last < int(_FINAL_EPOCH_SHARE * per_epoch)
    return Epochs(count, before_last, separate)


def _numbers(sequences: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(sequences, range):
        return np.arange(sequences.start, sequences.stop, sequences.step, dtype=np.int64)
    return np.asarray(sequences, np.int64)


def document_index(
    sequences: Sequence[int], epochs: Epochs, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    """The sequences of all epochs in reading order, int32[epochs * sequences]."""
    once = _numbers(sequences).astype(np.int32)
    parts = [epochs.count - 1, 1] if epochs.separate else [epochs.count]
    order = [np.tile(once, part) for part in parts]
    for part in order:
        random.shuffle(part)
    return np.concatenate(order)


def sample_index(lengths: npt.NDArray[np.integer], seq: int) -> npt.NDArray[np.integer]:
    """Starts of all samples, and the end of the last one: (place in the document index, token offset).

    `lengths` are the tokens of the documents in reading order. Returns int32[samples + 1, 2] (int64 where the
    places or offsets need it); empty documents hold no start.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    samples = (int(ends[-1]) - 1) // seq
    starts = np.arange(samples + 1, dtype=np.int64) * seq
    places = np.searchsorted(ends, starts, side="right")
    dtype = np.int32 if max(lengths.size, int(lengths.max())) <= np.iinfo(np.int32).max else np.int64
    index = np.empty((samples + 1, 2), dtype)
    index[:, 0] = places
    index[:, 1] = starts - (ends[places] - lengths[places])
    # The stream starts with the first document even if that one is empty.
    index[0] = 0
    return index


def shuffle_index(samples: int, epochs: Epochs, random: np.random.RandomState) -> npt.NDArray[np.integer]:
    """The sample at each position, uint32[samples] (int64 beyond 2^32)."""
    dtype = np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    first = epochs.before_last if epochs.separate else samples
    parts = [np.arange(first, dtype=dtype), np.arange(first, samples, dtype=dtype)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def _check_memory(indexed: IndexedDataset, places: int, samples: int) -> None:
    """Raise `InputError` early if the order of samples does not fit into memory."""
    needed = BYTES_OF_PLACE * places + BYTES_OF_SAMPLE * samples
    if needed > SMALL and needed > available_memory():
        raise InputError(
            f"{indexed.prefix}: the order of {samples:,} samples takes {needed / GIB:.1f} GiB, and this "
            f"machine has {available_memory() / GIB:.1f} GiB of memory; give a smaller --train-iters, or of "
            "--eval-iters"
        )


class SampleDataset:
    """Samples of `seq` + 1 tokens from some sequences of an indexed dataset; at least `num_samples` of them.

    If `num_samples` is None, it has one epoch. An `endless` order continues after its last sample with the
    same number of samples, in the order of the next seed. So a run may become longer without a change of its
    earlier order.

    Raises InputError if the sequences hold too few tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: Sequence[int],
        seq: int,
        num_samples: int | None,
        seed: int,
        endless: bool = False,
    ) -> None:
        self.indexed = indexed
        self.seq = seq
        self.sequences, self.num_samples, self.seed = sequences, num_samples, seed
        self.endless = endless
        self._later: tuple[int, SampleDataset] | None = None
        """The round of the order that follows the first, and its samples."""
        lengths = indexed.lengths[_numbers(sequences)]
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens < 2 or (num_samples is None and tokens <= seq):
            wanted = 2 if num_samples is not None else seq + 1
            raise InputError(
                f"{indexed.prefix}: {len(sequences)} documents with {tokens} tokens are too few for a "
                f"sample: give at least {wanted} tokens"
            )
        epochs = count_epochs(tokens, seq, num_samples)
        _check_memory(indexed, epochs.count * len(sequences), epochs.count * tokens // seq)
        random = np.random.RandomState(seed)
        self.document_index = document_index(sequences, epochs, random)
        self.sample_index = sample_index(indexed.lengths[self.document_index], seq)
        self.shuffle_index = shuffle_index(len(self.sample_index) - 1, epochs, random)

    def __len__(self) -> int:
        """The number of samples of the order, which an endless dataset repeats."""
        return self.shuffle_index.size

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """The tokens at a position of the training order, int64[seq + 1]."""
        number, place = divmod(position, len(self))
        if position < 0 or (number and not self.endless):
            raise IndexError(f"sample {position} of {len(self)} does not exist")
        return self._round(number).stream_sample(int(self._round(number).shuffle_index[place]))

    def _round(self, number: int) -> SampleDataset:
        if not number:
            return self
        if self._later is None or self._later[0] != number:
            seed = (self.seed + number) % 2**32
            later = SampleDataset(self.indexed, self.sequences, self.seq, self.num_samples, seed)
            self._later = number, later
        return self._later[1]

    def stream_sample(self, number: int) -> npt.NDArray[np.int64]:
        """Sample `number` of the stream of documents, before samples are shuffled, int64[seq + 1]."""
        (first, start), (last, stop) = self.sample_index[number : number + 2].tolist()
        parts = []
        for place in range(first, last + 1):
            offset = start if place == first else 0
            length = stop + 1 - offset if place == last else None
            parts.append(self.indexed.get(int(self.document_index[place]), offset, length))
        return np.concatenate(parts).astype(np.int64)

    def batch(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """The samples at some positions, int64[len(positions), seq + 1]."""
        return rows_of(self, positions)

    def starts(self, positions: Sequence[int]) -> None:
        """None, as the tokens of a stream show where documents begin (`Boundaries`)."""


class OrderedSamples(Protocol):
    """Samples of `seq` + 1 tokens in an order."""

    seq: int

    def sample(self, position: int) -> npt.NDArray[np.int64]: ...


def rows_of(dataset: OrderedSamples, positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """The samples at some positions, int64[len(positions), seq + 1]."""
    rows = np.empty((len(positions), dataset.seq + 1), np.int64)
    for row, position in zip(rows, positions, strict=True):
        row[:] = dataset.sample(position)
    return rows
