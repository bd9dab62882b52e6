"""The training, validation and test samples of a job: the one entry to prepared data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from costmodels.errors import InputError
from runtime.data.blend import BlendedDataset, corpus_samples, normalised_weights
from runtime.data.boundaries import Boundaries
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.packing import PackedDataset, with_prompts
from runtime.data.record import KnownTokenizer, Record, common_tokenizer, read_record
from runtime.data.samples import SampleDataset, split_sequences

Samples = SampleDataset | BlendedDataset | PackedDataset

_SPLITS = ("training", "validation", "test")
# Up to this size a token file is read whole to check its ids, beyond it in as many probes.
_CHECKED_BYTES = 256 * 2**20
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Blend:
    """Prefixes of .bin/.idx pairs, their weights in the mix (None: by size), and the flag that names them."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    flag: str = "--data-path"


@dataclass(frozen=True)
class Datasets:
    """The samples of each split (None where none were asked for), and their files.

    `train_samples` is the number of samples for which the training order was made; `blends` has the mixed
    files and weights by split.
    """

    train: Samples | None
    valid: Samples | None
    test: Samples | None
    indexed: tuple[IndexedDataset, ...]
    train_samples: int = 0
    blends: tuple[Blend | None, ...] = ()
    remake: Callable[[int], Samples] | None = None
    """A function that makes the training order for another number of samples."""
    boundaries: Boundaries | None = None
    """The treatment of boundaries of documents; None if they do not matter."""
    record: Record | None = None
    """The recorded tokenizer of the files; None without a record."""

    def with_train_order(self, train_samples: int | None) -> Datasets:
        """The datasets with a training order made for `train_samples`, as of the run's begin; None changes
        nothing.

        The order depends on the number of samples if a corpus is read more than once. A run whose length or
        global batch changes keeps its first order, so it skips and repeats no sample.
        """
        if self.remake is None or train_samples in (None, 0, self.train_samples):
            return self
        assert train_samples is not None
        return replace(self, train=self.remake(train_samples), train_samples=train_samples)


def parse_data_path(data_path: Sequence[str], flag: str = "--data-path") -> Blend:
    """The blend that `PREFIX`, `WEIGHT PREFIX WEIGHT PREFIX ...` or `PREFIX PREFIX ...` names.

    As in Megatron-LM's `get_blend_from_list`, an odd number of words has no weights.
    """
    words = [word.strip() for word in data_path]
    numbers = [_number(word) for word in words[::2]]
    if words and (len(words) % 2 or not any(number is not None for number in numbers)):
        return Blend(tuple(words), None, flag)
    weights = [number for number in numbers if number is not None]
    if not words or len(weights) != len(numbers) or not all(0 < weight < np.inf for weight in weights):
        raise InputError(
            f"{flag} {' '.join(words)!r}: expected one prefix, several, or a positive weight before each of "
            "several, as 0.3 PREFIX 0.7 PREFIX"
        )
    return Blend(tuple(words[1::2]), tuple(normalised_weights(weights)), flag)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def build_datasets(
    data_path: Sequence[str],
    split: str,
    seq: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    packs: bool = False,
) -> Datasets:
    """Samples of `seq` + 1 tokens for each split.

    `data_path` is one prefix of a .bin/.idx pair, several, or weights and prefixes by turns. `split` weighs
    training, validation and test, as "969,30,1", and applies to the sequences of each prefix. A split without
    requested samples is None. The order of the samples depends on the files, `split`, `seq`, `seed` and the
    number of samples, never on the layout. With `packs` samples hold whole documents.

    Raises InputError if a file is not readable or a requested split has no documents.
    """
    blend = parse_data_path(data_path)
    return _build((blend,) * 3, split, seq, seed, (train_samples, valid_samples, test_samples), packs)


def build_separate_datasets(
    data_paths: Sequence[Sequence[str]], seq: int, seed: int, samples: Sequence[int], packs: bool = False
) -> Datasets:
    """Build data sets as `build_datasets` does, from separate files for each split: `--train-data-path` and
    so on.

    `data_paths` and `samples` are for training, validation and test; a split without a path is None.
    """
    flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
    blends = [
        parse_data_path(path, name) if path else None for path, name in zip(data_paths, flags, strict=True)
    ]
    return _build(blends, None, seq, seed, samples, packs)


def _build(
    blends: Sequence[Blend | None],
    split: str | None,
    seq: int,
    seed: int,
    samples: Sequence[int],
    packs: bool,
) -> Datasets:
    opened: dict[str, IndexedDataset] = {}
    known: KnownTokenizer | None = None
    used = [blend if count else None for blend, count in zip(blends, samples, strict=True)]
    for blend in used:
        if blend is None:
            continue
        for prefix in blend.prefixes:
            if prefix not in opened:
                opened[prefix] = _opened(prefix, blend.flag)
                known = common_tokenizer(known, blend.flag, opened[prefix])

    def make(number: int, count: int) -> Samples:
        blend = used[number]
        assert blend is not None
        files = [opened[prefix] for prefix in blend.prefixes]
        return _split_samples(files, blend, split, number, seq, seed, count, packs)

    train, valid, test = (
        make(number, count) if used[number] is not None else None for number, count in enumerate(samples)
    )
    return Datasets(
        train,
        valid,
        test,
        tuple(opened.values()),
        samples[0],
        tuple(used),
        None if train is None else lambda count: make(0, count),
        record=known and known[1],
    )


def _opened(prefix: str, flag: str) -> IndexedDataset:
    try:
        dataset = IndexedDataset(prefix)
    except InputError as error:
        raise InputError(f"{flag} {error}") from None
    if not dataset.token_count:
        raise InputError(f"{flag} {dataset.prefix}: holds no tokens: prepare it from non-empty text")
    return dataset


def _split_samples(
    files: Sequence[IndexedDataset],
    blend: Blend,
    split: str | None,
    number: int,
    seq: int,
    seed: int,
    samples: int,
    packs: bool,
) -> Samples:
    """The order of one split, equal to that of Megatron's BlendedMegatronDatasetBuilder."""
    trains = number == 0
    # One prefix after its weight is a blend too, unless each split has files of its own.
    mixed = len(files) > 1 or (blend.weights is not None and split is not None)
    wanted: Sequence[int | None] = [samples]
    if mixed:
        weights = blend.weights
        wanted = [None] * len(files) if weights is None else corpus_samples(weights, samples)
    corpora: list[SampleDataset | PackedDataset] = []
    for dataset, count in zip(files, wanted, strict=True):
        sequences = range(len(dataset)) if split is None else split_sequences(len(dataset), split)[number]
        if not sequences:
            raise InputError(
                f"--split {split}: gives no {_SPLITS[number]} documents out of the {len(dataset)} of "
                f"{dataset.prefix}: {_remedy(split or '', number)}"
            )
        if packs:
            corpora.append(PackedDataset(dataset, sequences, seq, seed))
        else:
            corpora.append(SampleDataset(dataset, sequences, seq, count, seed, endless=trains))
    if not mixed:
        return corpora[0]
    if blend.weights is not None:
        size = sum(corpus_samples(blend.weights, samples, surplus=0))
        return BlendedDataset(corpora, blend.weights, size, endless=trains)
    sizes = [len(corpus) for corpus in corpora]
    if not trains and not packs and samples > sum(sizes):
        raise InputError(
            f"{blend.flag}: {_SPLITS[number]} needs {samples} samples, but one epoch of these files holds "
            f"{sum(sizes)}: evaluate fewer (--eval-iters), or give each prefix a weight"
        )
    return BlendedDataset(corpora, normalised_weights(sizes), min(samples, sum(sizes)), endless=trains)


def _remedy(split: str, number: int) -> str:
    enough = (count for count in range(1, 1001) if split_sequences(count, split)[number])
    documents = next(enough, None)
    remedies = [f"prepare at least {documents} documents"] if documents else []
    remedies += [f"give {_SPLITS[number]} more weight in --split"]
    remedies += ["do not evaluate (--eval-iters 0)"] if number else []
    return " or ".join(remedies)


def check_ids(rows: npt.NDArray[np.int64], vocab: int) -> None:
    """Raise InputError if a token id of a batch lies outside the model's vocabulary of `vocab` entries."""
    # Negative ones are huge without their sign, so that one pass finds both.
    if rows.size and int(rows.view(np.uint64).max()) >= vocab:
        worst = int(rows.min()) if rows.min() < 0 else int(rows.max())
        raise InputError(
            f"--data-path: holds token id {worst}, outside the model's vocabulary of {vocab}: give "
            "--vocab-size of the tokenizer that prepared it"
        )


def check_vocabulary(datasets: Datasets, vocab: int) -> None:
    """Raise InputError if a token id lies outside the model's vocabulary of `vocab` entries.

    Files above 256 MiB are probed at evenly spaced places instead of being read whole.
    """
    for dataset in datasets.indexed:
        probe = _PROBE_BYTES // dataset.dtype.itemsize
        known = read_record(dataset)
        hides = known is not None and known.hides_prompts
        probes = min(-(-dataset.token_count // probe), _CHECKED_BYTES // _PROBE_BYTES)
        for start in np.linspace(0, max(0, dataset.token_count - probe), probes, dtype=np.int64).tolist():
            part = dataset.read(start, min(probe, dataset.token_count - start))
            if hides:
                part = with_prompts(part.astype(np.int64))
            worst = int(part.min()) if part.min() < 0 else int(part.max())
            if not 0 <= worst < vocab:
                record = read_record(dataset)
                size = (
                    f"{record.vocab_size}, that of {record.name}, which"
                    if record
                    else "of the tokenizer that"
                )
                raise InputError(
                    f"--data-path {dataset.prefix}: holds token id {worst}, outside the model's vocabulary "
                    f"of {vocab}: give --vocab-size {size} prepared it"
                )
