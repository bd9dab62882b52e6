"""The order of samples: equal to Megatron's, complete, and independent of everything but its inputs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from runtime.data import blend
from runtime.data.blend import BlendedDataset
from runtime.data.datasets import build_datasets, build_separate_datasets, check_vocabulary
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.samples import Epochs, SampleDataset, count_epochs, sample_index, split_sequences

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "megatron_index_golden.json"


def corpus(folder: Path, lengths: list[int], name: str = "c", first: int = 0) -> IndexedDataset:
    """Documents of given lengths whose tokens count up from `first`, so that each token is unique."""
    with IndexedWriter(folder / name, np.int32) as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
    return IndexedDataset(folder / name)


def assert_indices(dataset: SampleDataset, documents: list, samples: list, shuffle: list) -> None:
    assert dataset.document_index.tolist() == documents
    assert dataset.sample_index.tolist() == samples
    assert dataset.shuffle_index.tolist() == shuffle
    assert [
        index.dtype.name for index in (dataset.document_index, dataset.sample_index, dataset.shuffle_index)
    ] == [
        "int32",
        "int32",
        "uint32",
    ]


def test_one_epoch_is_megatrons(tmp_path: Path) -> None:
    dataset = SampleDataset(corpus(tmp_path, [5, 3, 8, 2]), range(4), 4, 4, 1234)
    assert_indices(dataset, [0, 1, 2, 3], [[0, 0], [0, 4], [2, 0], [2, 4], [3, 0]], [1, 2, 3, 0])


def test_a_short_last_epoch_is_shuffled_apart_as_megatron_does(tmp_path: Path) -> None:
    dataset = SampleDataset(corpus(tmp_path, [5, 3, 8, 2]), range(4), 4, 9, 1234)
    samples = [[0, 0], [0, 4], [1, 0], [2, 1], [2, 5], [3, 1], [4, 0], [4, 4], [6, 0], [8, 0]]
    samples += [[8, 4], [9, 3], [9, 7], [11, 0]]
    shuffle = [7, 5, 6, 0, 4, 3, 2, 1, 9, 12, 11, 8, 10]
    assert_indices(dataset, [2, 1, 2, 0, 0, 1, 3, 3, 0, 2, 1, 3], samples, shuffle)


def test_all_golden_indices_are_equal(tmp_path: Path) -> None:
    if not GOLDEN.exists():
        pytest.skip(f"{GOLDEN} is not there")
    for number, case in enumerate(json.loads(GOLDEN.read_text())):
        indexed = corpus(tmp_path, case["sizes"], f"c{number}")
        dataset = SampleDataset(indexed, case["docs"], case["seq"], case["num_samples"], case["seed"])
        assert_indices(dataset, case["document_index"], case["sample_index"], case["shuffle_index"])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(lambda lengths: sum(lengths) > 1),
    seq=st.integers(1, 7),
    samples=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_samples_are_the_stream_of_documents(lengths: list[int], seq: int, samples: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        indexed = corpus(Path(folder), lengths)
        dataset = SampleDataset(indexed, range(len(indexed)), seq, samples, seed)
        stream = np.concatenate([indexed.get(document) for document in dataset.document_index])
        epochs = len(dataset.document_index) // len(indexed)
        # Every token of every epoch is in the stream, and the samples are the stream with one token shared.
        assert sorted(stream) == sorted(indexed.tokens.tolist() * epochs)
        assert len(dataset) == (len(stream) - 1) // seq >= samples
        assert len(stream) - sum(lengths) < samples * seq + 1
        for number in range(len(dataset)):
            expected = stream[number * seq : (number + 1) * seq + 1]
            np.testing.assert_array_equal(dataset.stream_sample(number), expected)
        assert sorted(dataset.shuffle_index) == list(range(len(dataset)))
        batch = dataset.batch(range(len(dataset)))
        assert batch.shape == (len(dataset), seq + 1) and batch.dtype == np.int64
        np.testing.assert_array_equal(batch[0], dataset.stream_sample(int(dataset.shuffle_index[0])))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), seq=st.integers(1, 7))
def test_sample_index_equals_a_walk_over_the_documents(lengths: list[int], seq: int) -> None:
    if sum(lengths) < 2:
        return
    expected = [[0, 0]]
    place, offset = 0, 0
    for _ in range((sum(lengths) - 1) // seq):
        missing = seq + 1
        while missing > lengths[place] - offset:
            missing -= lengths[place] - offset
            place, offset = place + 1, 0
        offset += missing - 1
        expected.append([place, offset])
    assert sample_index(np.array(lengths, np.int32), seq).tolist() == expected


def test_order_changes_with_the_seed_only(tmp_path: Path) -> None:
    indexed = corpus(tmp_path, [7] * 40)
    first, again, other = (SampleDataset(indexed, range(40), 6, 30, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.batch(range(30)), again.batch(range(30)))
    assert not np.array_equal(first.batch(range(30)), other.batch(range(30)))


def test_positions_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    dataset = SampleDataset(corpus(tmp_path, [9, 9]), range(2), 4, None, 1)
    assert len(dataset) == 4
    for position in (-1, 4):
        with pytest.raises(IndexError):
            dataset.sample(position)


@pytest.mark.parametrize(
    ("count", "split", "ends"),
    [
        (1000, "969,30,1", (969, 999, 1000)),
        (734, "969,30,1", (711, 733, 734)),
        (1, "969,30,1", (1, 1, 1)),
        (10, "98,2", (10, 10, 10)),
        (10, "1", (10, 10, 10)),
        (10, "0,1,1", (0, 5, 10)),
    ],
)
def test_split_follows_the_weights(count: int, split: str, ends: tuple[int, int, int]) -> None:
    ranges = split_sequences(count, split)
    assert tuple(part.stop for part in ranges) == ends
    assert [part.start for part in ranges] == [0, *ends[:2]]


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1,1", "inf,1,1"])
def test_bad_split_is_one_line(split: str) -> None:
    with pytest.raises(InputError, match="--split"):
        split_sequences(10, split)


def test_datasets_of_the_three_splits_do_not_overlap(tmp_path: Path) -> None:
    corpus(tmp_path, [20] * 10)
    datasets = build_datasets([str(tmp_path / "c")], "8,1,1", 4, 1, 40, 4, 4)
    seen = [
        set(part.batch(range(len(part))).ravel().tolist())
        for part in (datasets.train, datasets.valid, datasets.test)
    ]
    assert max(seen[0]) < 160 <= min(seen[1]) and max(seen[1]) < 180 <= min(seen[2])


def test_a_split_without_documents_fails_only_when_asked_for(tmp_path: Path) -> None:
    corpus(tmp_path, [50])
    datasets = build_datasets([str(tmp_path / "c")], "969,30,1", 4, 1, 100)
    assert datasets.valid is None and datasets.train is not None and len(datasets.train) >= 100
    with pytest.raises(InputError, match=r"no validation documents out of the 1 .* at least 17 documents"):
        build_datasets([str(tmp_path / "c")], "969,30,1", 4, 1, 100, 10)
    with pytest.raises(InputError, match="no test documents"):
        build_datasets([str(tmp_path / "c")], "1,1,0", 4, 1, 0, 0, 10)


def test_too_few_tokens_are_named(tmp_path: Path) -> None:
    corpus(tmp_path, [1])
    with pytest.raises(InputError, match="1 documents with 1 tokens are too few"):
        build_datasets([str(tmp_path / "c")], "1", 4, 1, 10)
    corpus(tmp_path, [0, 0], "empty")
    with pytest.raises(InputError, match="holds no tokens"):
        build_datasets([str(tmp_path / "empty")], "1", 4, 1, 10)


def test_blend_follows_megatrons_rule(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 1000)):
        corpus(tmp_path, [9] * 20, name, first)
    datasets = build_datasets(["3", str(tmp_path / "a"), "1", str(tmp_path / "b")], "1", 4, 1, 40)
    mixed = datasets.train
    assert isinstance(mixed, BlendedDataset) and len(mixed) == 40
    # Worked by hand: the largest of .75 max(i, 1) - count_a and .25 max(i, 1) - count_b, a on a tie.
    assert [mixed.place(position)[0] for position in range(9)] == [0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert [mixed.place(position)[1] for position in range(6)] == [0, 0, 1, 2, 3, 1]
    batch = mixed.batch(range(40))
    assert (batch[:, 0] >= 1000).sum() == 10
    np.testing.assert_array_equal(batch[1], mixed.corpora[1].sample(0))


def walk(weights: list[float], size: int) -> list[tuple[int, int]]:
    """Megatron's build_blending_indices, step by step."""
    shares = np.array(weights) / np.sum(weights)
    counts, found = [0] * len(weights), []
    for position in range(size):
        lags = shares * max(float(position), 1.0) - counts
        chosen = 0
        for number in range(1, len(weights)):
            if lags[number] > lags[chosen]:
                chosen = number
        found.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return found


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=12), size=st.integers(1, 60))
def test_blends_are_megatrons_in_whatever_order_they_are_read(weights: list[float], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_BLOCK", 7)
        corpus(Path(folder), [9] * 4)
        words = [word for weight in weights for word in (repr(weight), f"{folder}/c")]
        train = build_datasets(words, "1", 4, 1, size).train
        assert isinstance(train, BlendedDataset)
        positions = [*range(size), *range(size - 1, -1, -3)]
        assert [train.place(position) for position in positions] == [
            walk(weights, size)[position] for position in positions
        ]


def test_one_prefix_with_a_weight_is_a_blend_as_in_megatron(tmp_path: Path) -> None:
    corpus(tmp_path, [5] * 16)
    # 16 x 5 tokens are 19 samples an epoch; a blend asks for one more than 19, and so for a second epoch.
    plain = build_datasets([str(tmp_path / "c")], "1", 4, 1, 19).train
    weighted = build_datasets(["1.0", str(tmp_path / "c")], "1", 4, 1, 19).train
    assert isinstance(weighted, BlendedDataset) and len(weighted) == 19
    assert len(plain.document_index) == 16 and len(weighted.corpora[0].document_index) == 32


def test_several_prefixes_without_weights_are_mixed_by_their_samples(tmp_path: Path) -> None:
    for name, documents, first in (("a", 30, 0), ("b", 10, 1000)):
        corpus(tmp_path, [9] * documents, name, first)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    datasets = build_datasets(paths, "1", 4, 1, 40)
    assert datasets.train is not None and (datasets.train.batch(range(40))[:, 0] >= 1000).sum() == 10
    with pytest.raises(InputError, match="validation needs 100 samples, but one epoch of these files holds"):
        build_datasets(paths, "1,1", 4, 1, 0, 100)


def test_each_split_may_have_files_of_its_own(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 1000), ("c", 2000)):
        corpus(tmp_path, [9] * 20, name, first)
    paths = [[str(tmp_path / name)] for name in "abc"]
    datasets = build_separate_datasets(paths, 4, 1, (40, 8, 8))
    for samples, first in ((datasets.train, 0), (datasets.valid, 1000), (datasets.test, 2000)):
        assert samples is not None
        assert samples.batch([0, 3]).min() >= first and samples.batch(range(8)).max() < first + 1000
    assert build_separate_datasets([paths[0], [], []], 4, 1, (40, 8, 8)).valid is None
    with pytest.raises(InputError, match=r"--valid-data-path .*none\.idx: no such file"):
        build_separate_datasets([paths[0], [str(tmp_path / "none")], []], 4, 1, (40, 8, 8))


@pytest.mark.parametrize("words", [["{0}"], ["0.3", "{0}", "0.7", "{1}"], ["{0}", "{1}"]])
def test_a_run_that_becomes_longer_keeps_its_order(tmp_path: Path, words: list[str]) -> None:
    for name, first in (("a", 0), ("b", 1000)):
        corpus(tmp_path, list(range(1, 20)), name, first)
    path = [word.format(tmp_path / "a", tmp_path / "b") for word in words]
    short, long = (build_datasets(path, "1", 4, 1, samples) for samples in (50, 400))
    before, again = short.train, long.with_train_order(50).train
    assert before is not None and again is not None and long.train is not None
    np.testing.assert_array_equal(before.batch(range(300)), again.batch(range(300)))
    assert long.with_train_order(None) is long and long.with_train_order(400) is long
    if len(words) == 2:
        # Without weights the order is that of one epoch after the other, however long the run.
        return
    assert not np.array_equal(before.batch(range(50)), long.train.batch(range(50)))


def test_what_follows_the_order_is_another_order_of_the_same_samples(tmp_path: Path) -> None:
    corpus(tmp_path, [4] * 20 + [1])
    train = build_datasets([str(tmp_path / "c")], "1", 4, 1, 20).train
    assert train is not None and len(train) == 20
    first, second, third = (train.batch(range(start, start + 20))[:, :-1] for start in (0, 20, 40))
    assert not np.array_equal(first, second) and not np.array_equal(second, third)
    # Each order leaves out one of 81 tokens.
    assert len(np.unique(first)) == len(np.unique(second)) == len(np.unique(third)) == 80
    np.testing.assert_array_equal(train.batch(range(20, 40))[:, :-1], second)


@pytest.mark.parametrize("paths", [[], ["a", "b"], ["1", "a", "2"], ["0", "a", "1", "b"], ["nan", "a"]])
def test_bad_data_path_is_one_line(paths: list[str]) -> None:
    with pytest.raises(InputError, match="--data-path"):
        build_datasets(paths, "1", 4, 1, 10)


def test_ids_outside_the_vocabulary_are_found(tmp_path: Path) -> None:
    corpus(tmp_path, [300_000, 300_000])
    datasets = build_datasets([str(tmp_path / "c")], "1", 4, 1, 10)
    check_vocabulary(datasets, 600_000)
    with pytest.raises(InputError, match="token id 599999, outside the model's vocabulary of 599999"):
        check_vocabulary(datasets, 599_999)
    with IndexedWriter(tmp_path / "negative", np.int32) as writer:
        writer.add_document([3, -1, 2])
    with pytest.raises(InputError, match="token id -1"):
        check_vocabulary(build_datasets([str(tmp_path / "negative")], "1", 2, 1, 1), 10)


@pytest.mark.parametrize(
    ("tokens", "samples", "epochs"),
    [
        # Megatron's rule: a last epoch of which less than 80 % is used is shuffled apart.
        (1001, 101, Epochs(2, 100, True)),
        (1001, 179, Epochs(2, 100, True)),
        (1001, 180, Epochs(2, 100, False)),
        (1001, 200, Epochs(2, 100, False)),
        (1001, 201, Epochs(3, 200, True)),
        (1001, None, Epochs(1, 0, False)),
        # 80 % of 104 samples are 83 whole ones; the 8 tokens after them are not a sample.
        (1049, 186, Epochs(2, 104, True)),
        (1049, 187, Epochs(2, 104, False)),
    ],
)
def test_epochs_are_counted_as_in_megatron(tokens: int, samples: int | None, epochs: Epochs) -> None:
    # 1001 tokens hold 100 samples of 10 and the token after the last one; two epochs hold 200.
    assert count_epochs(tokens, 10, samples) == epochs


def test_a_document_of_more_than_2_to_the_31_tokens_has_room_in_the_index() -> None:
    index = sample_index(np.array([2**32 + 2, 1]), 2**31)
    assert index.tolist() == [[0, 0], [0, 2**31], [0, 2**32]]
