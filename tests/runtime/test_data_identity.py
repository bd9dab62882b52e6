"""Changed data is noticed at resume, and ids that the model does not have at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels.errors import InputError
from runtime.checkpoint.loader import _check_data
from runtime.data import IndexedDataset, IndexedWriter
from runtime.data.datasets import build_datasets, check_ids
from runtime.data.identity import BLOCK_BYTES, BLOCKS, difference, identity
from runtime.job.job import Job, sample_order
from runtime.settings.training_options import DataOptions, TrainingOptions
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import checkpoints as work
from tests.support.worker_pool import WorkerPool

DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def written(prefix: Path, documents: list[list[int]]) -> list[dict[str, Any]]:
    """The identity of these documents."""
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return identity([IndexedDataset(prefix)])


def test_changed_data_of_as_many_tokens_is_told_apart(tmp_path: Path) -> None:
    before = written(tmp_path / "text", DOCUMENTS)
    assert difference(before, written(tmp_path / "text", DOCUMENTS)) is None
    moved = written(tmp_path / "elsewhere", DOCUMENTS)
    assert difference(before, moved) is None
    reordered = written(tmp_path / "text", [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2]])
    assert difference(before, reordered) == "text.idx has other lengths or order of documents"
    changed = written(tmp_path / "text", [[1, 2, 4], *DOCUMENTS[1:]])
    assert difference(before, changed) == "text.bin has other tokens"
    other = written(tmp_path / "other", [[1, 2, 4], *DOCUMENTS[1:]])
    assert difference(before, other) == "other.bin, in the place of text, has other tokens"
    assert difference(before, before * 2) == "2 pairs of .bin and .idx instead of 1"


@pytest.mark.slow
def test_of_a_large_file_blocks_are_read_that_reach_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * BLOCKS * BLOCK_BYTES // 2
    ids = np.zeros(size, np.uint16)
    before = written(tmp_path / "text", [ids.tolist()])
    read: list[int] = []
    whole = IndexedDataset.read
    monkeypatch.setattr(
        IndexedDataset, "read", lambda self, start, count: read.append(count) or whole(self, start, count)
    )
    for place in (0, size - 1):
        ids[place] = 1
        assert difference(before, written(tmp_path / "text", [ids.tolist()])) == "text.bin has other tokens"
        ids[place] = 0
    assert sum(read) == 2 * BLOCKS * BLOCK_BYTES // 2


def test_a_checkpoint_goes_on_with_the_same_data_only(tmp_path: Path) -> None:
    data = written(tmp_path / "text", DOCUMENTS)
    told = {"tokens": 9, "data": data}
    _check_data(tmp_path, told, {"tokens": 9, "data": data})
    # Older checkpoints that tell no data, and a run that allows other data.
    _check_data(tmp_path, {"tokens": 9}, {"tokens": 9, "data": data})
    _check_data(tmp_path, told, {})
    other = written(tmp_path / "text", [[1, 2, 4], *DOCUMENTS[1:]])
    with pytest.raises(
        InputError, match=r"trained on other data: text.bin has other tokens; .*--allow-data-change"
    ):
        _check_data(tmp_path, told, {"tokens": 9, "data": other})


@pytest.mark.parametrize("worst", [30, 2**40, -1])
def test_ids_beyond_the_vocabulary_are_refused(worst: int) -> None:
    rows = np.full((2, 9), 29, np.int64)
    check_ids(rows, 30)
    rows[1, 4] = worst
    with pytest.raises(InputError, match=rf"holds token id {worst}, outside the model's vocabulary of 30"):
        check_ids(rows, 30)


def test_every_rank_of_a_tensor_parallel_layout_refuses_such_an_id(pool: WorkerPool) -> None:
    spec = MODELS["gpt2"]
    refused = pool.run(work.refused_ids, 2, spec, parse_layout("gbs=2,tp=2", spec))
    assert all(f"holds token id {spec.vocab}, outside the model's vocabulary" in line for line in refused)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"training": TrainingOptions(seed=5)}, "seed"),
        ({"data": DataOptions(split="90,10,0")}, "split"),
        ({"data": DataOptions(data_path=["0.4", "FIRST", "0.6", "SECOND"])}, "blend"),
    ],
)
def test_a_checkpoint_says_all_that_decides_the_order_of_samples(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    """Another seed, split or blend of the same files gives other samples, and is told apart."""
    for prefix in ("FIRST", "SECOND"):
        written(tmp_path / prefix, [[one, one + 1, 7] for one in range(60)])

    def order(**options: Any) -> dict[str, Any]:
        usual = DataOptions(data_path=["0.5", "FIRST", "0.5", "SECOND"])
        job = Job(**{"data": usual, **options})
        words = job.data.data_path or usual.data_path
        paths = [str(tmp_path / word) if word.isalpha() else word for word in words]
        return sample_order(job, build_datasets(paths, job.data.split, 4, job.training.seed, 8))

    before, after = order(), order(**changes)
    assert {key for key in before if before[key] != after[key]} == {name}
