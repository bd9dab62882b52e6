"""Several corpora mixed by weight, in the order of Megatron's BlendedDataset.

Position i takes the next sample of the corpus whose count lags most behind its weight: the largest
w_j * max(i, 1) - count_j, the first one on a tie (build_blending_indices in
megatron/core/datasets/helpers.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.data.samples import SampleDataset

# The share by which each corpus holds more samples than its weight asks for, as in Megatron.
_SURPLUS = 0.005
_BLOCK = 4096


def corpus_samples(weights: Sequence[float], num_samples: int, surplus: float = _SURPLUS) -> list[int]:
    """How many samples each corpus contributes to a blend of `num_samples`, rounded up with a surplus."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


class BlendedDataset:
    """Samples of several corpora of one sequence length; `weights` add up to one.

    The choice of the corpus is a recurrence over positions, so it is worked out in blocks as far as
    the positions asked for reach, not for the whole training ahead.
    """

    def __init__(self, corpora: Sequence[SampleDataset], weights: Sequence[float], num_samples: int) -> None:
        self.corpora = list(corpora)
        self.weights = list(weights)
        self.seq = self.corpora[0].seq
        self._size = sum(corpus_samples(weights, num_samples, surplus=0))
        self._counts = [0] * len(self.corpora)
        self._blocks: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]] = []

    def __len__(self) -> int:
        return self._size

    def place(self, position: int) -> tuple[int, int]:
        """The corpus of a position and the sample within it."""
        if not 0 <= position < self._size:
            raise IndexError(f"sample {position} of {self._size} does not exist")
        while len(self._blocks) * _BLOCK <= position:
            self._extend()
        corpora, samples = self._blocks[position // _BLOCK]
        return int(corpora[position % _BLOCK]), int(samples[position % _BLOCK])

    def _extend(self) -> None:
        start, counts = len(self._blocks) * _BLOCK, self._counts
        corpora, samples = np.empty(_BLOCK, np.int16), np.empty(_BLOCK, np.int64)
        for i in range(_BLOCK):
            position = max(start + i, 1)
            lags = [weight * position - count for weight, count in zip(self.weights, counts, strict=True)]
            chosen = lags.index(max(lags))
            corpora[i], samples[i] = chosen, counts[chosen]
            counts[chosen] += 1
        self._blocks.append((corpora, samples))

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """The tokens at a position of the training order, int64[seq + 1]."""
        corpus, sample = self.place(position)
        return self.corpora[corpus].sample(sample)

    def batch(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """The samples at some positions, int64[len(positions), seq + 1]."""
        rows = np.empty((len(positions), self.seq + 1), np.int64)
        for row, position in zip(rows, positions, strict=True):
            row[:] = self.sample(position)
        return rows
