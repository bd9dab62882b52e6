"""Several corpora mixed by weight, in the order of Megatron's BlendedDataset.

Position i gets the next sample of the corpus whose count is furthest behind its weight, which has the largest
w_j * max(i, 1) - count_j. The first corpus wins a tie (build_blending_indices in
megatron/core/datasets/helpers.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.data.packing import PackedDataset
from runtime.data.samples import SampleDataset, rows_of

# The share by which each corpus holds more samples than its weight asks for, as in Megatron.
_SURPLUS = 0.005
_BLOCK = 4096


def corpus_samples(weights: Sequence[float], num_samples: int, surplus: float = _SURPLUS) -> list[int]:
    """Samples that each corpus contributes to a blend of `num_samples`, rounded up with a surplus."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def normalised_weights(weights: Sequence[float]) -> list[float]:
    """Weights that add up to one, rounded as Megatron's `normalize` does."""
    array = np.array(weights, np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


class BlendedDataset:
    """Samples of several corpora of one sequence length; `weights` add up to one.

    The choice of the corpus is a recurrence over positions. It is computed in blocks, up to the requested
    positions; only the start of a finished block is kept. `size` positions exist; an `endless` blend of
    endless corpora continues after them.
    """

    def __init__(
        self,
        corpora: Sequence[SampleDataset | PackedDataset],
        weights: Sequence[float],
        size: int,
        endless: bool = False,
    ) -> None:
        self.corpora = list(corpora)
        self.weights = list(weights)
        self.seq = self.corpora[0].seq
        self._size, self.endless = size, endless
        self._begins: list[list[int]] = [[0] * len(self.corpora)]
        """Samples that each corpus has given before each block."""
        self._blocks: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return self._size

    def place(self, position: int) -> tuple[int, int]:
        """The corpus of a position and the sample within it."""
        if position < 0 or (position >= self._size and not self.endless):
            raise IndexError(f"sample {position} of {self._size} does not exist")
        number = position // _BLOCK
        while number >= len(self._begins):
            self._choose(len(self._begins) - 1)
        if number not in self._blocks:
            # Positions come in order, and a batch may reach over the end of a block.
            self._blocks = {key: block for key, block in self._blocks.items() if key == number - 1}
            self._blocks[number] = self._places(number)
        corpora, samples = self._blocks[number]
        return int(corpora[position % _BLOCK]), int(samples[position % _BLOCK])

    def _choose(self, number: int) -> list[int]:
        """The corpus of each position of a block whose start is known."""
        counts, weights = list(self._begins[number]), self.weights
        choices = []
        for position in range(number * _BLOCK, (number + 1) * _BLOCK):
            scale = float(position or 1)
            lags = [weight * scale - count for weight, count in zip(weights, counts, strict=True)]
            chosen = lags.index(max(lags))
            counts[chosen] += 1
            choices.append(chosen)
        if number == len(self._begins) - 1:
            self._begins.append(counts)
        return choices

    def _places(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The corpus of each position of a block, and the sample within it."""
        corpora = np.array(self._choose(number), np.int32)
        samples = np.empty(_BLOCK, np.int64)
        for corpus, begin in enumerate(self._begins[number]):
            places = np.flatnonzero(corpora == corpus)
            samples[places] = begin + np.arange(places.size)
        return corpora, samples

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """The tokens at a position of the training order, int64[seq + 1]."""
        corpus, sample = self.place(position)
        return self.corpora[corpus].sample(sample)

    def batch(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """The samples at some positions, int64[len(positions), seq + 1]."""
        return rows_of(self, positions)

    def starts(self, positions: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Start of each token's document in its sample, [len(positions), seq + 1]; None if unknown."""
        places = [self.place(position) for position in positions]
        starts = [self.corpora[corpus].starts([sample]) for corpus, sample in places]
        known = [one for one in starts if one is not None]
        return np.concatenate(known) if known else None
