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
from runtime.data.blend import BlendedDataset
from runtime.data.datasets import build_datasets, check_vocabulary
from runtime.data.indexed import IndexedDataset, IndexedWriter
from runtime.data.samples import SampleDataset, sample_index, split_sequences

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
            np.testing.assert_array_equal(dataset.unshuffled(number), expected)
        assert sorted(dataset.shuffle_index) == list(range(len(dataset)))
        batch = dataset.batch(range(len(dataset)))
        assert batch.shape == (len(dataset), seq + 1) and batch.dtype == np.int64
        np.testing.assert_array_equal(batch[0], dataset.unshuffled(int(dataset.shuffle_index[0])))


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
    blend = datasets.train
    assert isinstance(blend, BlendedDataset) and len(blend) == 40
    # Worked by hand: the largest of .75 max(i, 1) - count_a and .25 max(i, 1) - count_b, a on a tie.
    assert [blend.place(position)[0] for position in range(9)] == [0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert [blend.place(position)[1] for position in range(6)] == [0, 0, 1, 2, 3, 1]
    batch = blend.batch(range(40))
    assert (batch[:, 0] >= 1000).sum() == 10
    np.testing.assert_array_equal(batch[1], blend.corpora[1].sample(0))


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
