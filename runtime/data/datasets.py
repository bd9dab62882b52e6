"""The training, validation and test samples of a job: the one entry to prepared data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.errors import InputError
from runtime.data.blend import BlendedDataset, corpus_samples
from runtime.data.indexed import IndexedDataset
from runtime.data.samples import SampleDataset, split_sequences

Samples = SampleDataset | BlendedDataset

_SPLITS = ("training", "validation", "test")
# Up to this size a token file is read whole to check its ids, beyond it in as many probes.
_CHECKED_BYTES = 256 * 2**20
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Datasets:
    """The samples of each split, None where none were asked for, and the files that they come from."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None
    indexed: tuple[IndexedDataset, ...]


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float]]:
    """Prefixes and their weights, which add up to one, from `PREFIX` or `WEIGHT PREFIX WEIGHT PREFIX ...`."""
    if len(data_path) == 1:
        return [data_path[0]], [1.0]
    try:
        weights = [float(weight) for weight in data_path[::2]]
    except ValueError:
        weights = []
    prefixes = list(data_path[1::2])
    usable = len(weights) == len(prefixes) > 0 and all(0 < weight < np.inf for weight in weights)
    if not usable:
        raise InputError(
            f"--data-path {' '.join(data_path)!r}: expected one prefix, or a positive weight before each of "
            "several, as 0.3 PREFIX 0.7 PREFIX"
        )
    return prefixes, [weight / sum(weights) for weight in weights]


def build_datasets(
    data_path: Sequence[str],
    split: str,
    seq: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
) -> Datasets:
    """Samples of `seq` + 1 tokens for each split.

    `data_path` is one prefix of a .bin/.idx pair or weights and prefixes by turns; `split` weighs training,
    validation and test, as "969,30,1", and applies to the sequences of each prefix; a split of which no
    samples are asked for is None. The order of the samples depends on the files, `split`, `seq`, `seed` and
    the number of samples, never on the layout.

    Raises InputError if a file is not readable or a split that is asked for holds no documents.
    """
    prefixes, weights = parse_data_path(data_path)
    indexed = tuple(_opened(prefix) for prefix in prefixes)
    for dataset in indexed:
        if dataset.tokens.size == 0:
            raise InputError(f"--data-path {dataset.prefix}: holds no tokens: prepare it from non-empty text")
    train, valid, test = (
        _split_samples(indexed, weights, split, number, seq, seed, samples) if samples else None
        for number, samples in enumerate((train_samples, valid_samples, test_samples))
    )
    return Datasets(train, valid, test, indexed)


def _opened(prefix: str) -> IndexedDataset:
    try:
        return IndexedDataset(prefix)
    except InputError as error:
        raise InputError(f"--data-path {error}") from None


def _split_samples(
    indexed: Sequence[IndexedDataset],
    weights: Sequence[float],
    split: str,
    number: int,
    seq: int,
    seed: int,
    samples: int,
) -> Samples:
    wanted = [samples] if len(indexed) == 1 else corpus_samples(weights, samples)
    corpora = []
    for dataset, count in zip(indexed, wanted, strict=True):
        sequences = split_sequences(len(dataset), split)[number]
        if not sequences:
            raise InputError(
                f"--split {split}: gives no {_SPLITS[number]} documents out of the {len(dataset)} of "
                f"{dataset.prefix}: {_remedy(split, number)}"
            )
        corpora.append(SampleDataset(dataset, sequences, seq, count, seed))
    return corpora[0] if len(corpora) == 1 else BlendedDataset(corpora, weights, samples)


def _remedy(split: str, number: int) -> str:
    enough = (count for count in range(1, 1001) if split_sequences(count, split)[number])
    documents = next(enough, None)
    ways = [f"prepare at least {documents} documents"] if documents else []
    ways += [f"give {_SPLITS[number]} more weight in --split"]
    ways += ["do not evaluate (--eval-iters 0)"] if number else []
    return " or ".join(ways)


def check_vocabulary(datasets: Datasets, vocab: int) -> None:
    """Raise InputError if a token id lies outside the model's vocabulary of `vocab` entries.

    Files above 256 MiB are probed at evenly spaced places instead of being read whole.
    """
    for dataset in datasets.indexed:
        tokens = dataset.tokens
        probe = _PROBE_BYTES // tokens.itemsize
        probes = min(-(-tokens.size // probe), _CHECKED_BYTES // _PROBE_BYTES)
        for start in np.linspace(0, max(0, tokens.size - probe), probes, dtype=np.int64):
            part = tokens[start : start + probe]
            worst = int(part.min()) if part.min() < 0 else int(part.max())
            if not 0 <= worst < vocab:
                raise InputError(
                    f"--data-path {dataset.prefix}: holds token id {worst}, outside the model's vocabulary "
                    f"of {vocab}: give --vocab-size of the tokenizer that prepared it"
                )
