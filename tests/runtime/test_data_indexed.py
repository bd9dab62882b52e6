"""The .bin/.idx pair: byte for byte Megatron's, and every kind of damage is named in one line."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from runtime.data import indexed_writer
from runtime.data.indexed_dataset import IndexedDataset, best_dtype
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.merge import merge

DOCUMENTS = [[5, 6, 7], [1], [], [9, 9, 9, 9]]


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_example_is_written_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 5)
    expected += struct.pack("<3i", 3, 1, 4) + struct.pack("<3q", 0, 6, 8) + struct.pack("<5q", 0, 1, 2, 2, 3)
    assert (tmp_path / "c.idx").read_bytes() == expected
    assert len(expected) == 110
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<8H", 5, 6, 7, 1, 9, 9, 9, 9)


def test_a_document_of_sentences_has_a_sequence_for_each(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        tokens = np.array([5, 6, 7, 1, 9])
        writer.add_documents(tokens, np.array([2, 1, 1, 1]), np.array([0, 3, 1]))
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 4) + struct.pack("<4i", 2, 1, 1, 1)
    expected += struct.pack("<4q", 0, 4, 6, 8) + struct.pack("<4q", 0, 0, 3, 4)
    assert (tmp_path / "c.idx").read_bytes() == expected


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_prefix_may_carry_either_ending(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "c", DOCUMENTS)
    dataset = IndexedDataset(f"{tmp_path / 'c'}{ending}")
    assert (len(dataset), dataset.documents, dataset.tokens.size) == (3, 4, 8)
    assert dataset.lengths.dtype == np.int32 and dataset.pointers.dtype == np.int64


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 255), max_size=12), max_size=12),
    dtype=st.sampled_from([np.uint8, np.int16, np.uint16, np.int32, np.int64]),
)
def test_round_trip(documents: list[list[int]], dtype: type) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = IndexedDataset(write(Path(folder) / "c", documents, dtype))
        ends = dataset.document_indices
        for document, start, end in zip(documents, ends[:-1], ends[1:], strict=True):
            found = [token for sequence in range(start, end) for token in dataset.get(sequence).tolist()]
            assert found == document
        assert dataset.dtype == dtype


def test_get_reads_a_stretch_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "c", [[1, 2], [3, 4, 5, 6]]))
    assert dataset.get(1, 1, 2).tolist() == [4, 5]
    assert dataset.get(1, 2).tolist() == [5, 6]
    assert dataset.get(0, 2).tolist() == []
    with pytest.raises(IndexError):
        dataset.get(0, 1, 2)
    with pytest.raises(IndexError):
        dataset.get(0, -1)


def test_multimodal_modes_are_read(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    assert IndexedDataset(tmp_path / "c").modes is None
    path = tmp_path / "c.idx"
    path.write_bytes(path.read_bytes() + bytes([0, 1, 0]))
    dataset = IndexedDataset(tmp_path / "c")
    assert dataset.get(2).tolist() == [9, 9, 9, 9]
    assert dataset.modes is not None and dataset.modes.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx: idx[:20], "truncated index: 20 bytes"),
        (lambda idx: b"", "truncated index: 0 bytes"),
        (lambda idx: b"NOTANIDX\0" + idx[9:], "not a Megatron index"),
        (lambda idx: idx[:9] + struct.pack("<Q", 2) + idx[17:], "version 2"),
        (lambda idx: idx[:17] + b"\7" + idx[18:], "dtype code 7"),
        (lambda idx: idx[:-4], "truncated or corrupt index: 106 bytes"),
        (lambda idx: idx[:18] + struct.pack("<Q", 2**60) + idx[26:], "truncated or corrupt"),
        (lambda idx: idx[:34] + struct.pack("<i", 30) + idx[38:], "describes 70"),
        (lambda idx: idx[:34] + struct.pack("<i", -3) + idx[38:], "negative sequence length"),
        (lambda idx: idx[:46] + struct.pack("<q", 12) + idx[54:], "outside c.bin"),
        (lambda idx: idx[:54] + struct.pack("<q", 4) + idx[62:], "sequence 1 does not start where the one"),
        (lambda idx: idx[:-24] + struct.pack("<2q", 2**63 - 1, -(2**63)) + idx[-8:], "do not cover"),
        (lambda idx: idx[:-8] + struct.pack("<q", 2), "do not cover its 3 sequences"),
    ],
)
def test_damaged_index_is_named(tmp_path: Path, damage, message: str) -> None:
    write(tmp_path / "c", DOCUMENTS)
    path = tmp_path / "c.idx"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=message) as caught:
        IndexedDataset(tmp_path / "c")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_corrupt_index_is_refused_or_read_as_it_was(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = write(Path(folder) / "c", DOCUMENTS)
        whole = bytearray(Path(f"{prefix}.idx").read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        Path(f"{prefix}.idx").write_bytes(
            whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))]
        )
        try:
            dataset = IndexedDataset(prefix)
        except InputError as error:
            assert str(prefix) in str(error) and "\n" not in str(error)
            return
        # Damage that stays unseen moves tokens to the next sequence, or between types of one size.
        found = [dataset.get(sequence) for sequence in range(len(dataset))]
        tokens = np.concatenate([np.empty(0, dataset.dtype), *found])
        assert tokens.tobytes() == Path(f"{prefix}.bin").read_bytes()
        assert dataset.document_indices[-1] == len(dataset)


def test_a_file_that_shrinks_or_fails_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = IndexedDataset(write(tmp_path / "c", DOCUMENTS))
    os.truncate(tmp_path / "c.bin", 10)
    assert dataset.get(0).tolist() == [5, 6, 7]
    with pytest.raises(InputError, match=r"c\.bin: holds 10 bytes now, but held 16 when it was opened"):
        dataset.get(2)

    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(InputError, match=r"c\.bin: cannot be read: Input/output error"):
        dataset.get(0)


def test_truncated_bin_and_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    (tmp_path / "c.bin").write_bytes(b"\0\0")
    with pytest.raises(InputError, match=r"c\.bin: holds 2 bytes, but c\.idx describes 16"):
        IndexedDataset(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    with pytest.raises(InputError, match=r"c\.bin: no such file"):
        IndexedDataset(tmp_path / "c")
    with pytest.raises(InputError, match=r"none\.idx: no such file"):
        IndexedDataset(tmp_path / "none")


def test_a_failed_write_leaves_the_old_pair_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "c", DOCUMENTS)
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]
    assert IndexedDataset(tmp_path / "c").tokens.size == 8


@pytest.mark.parametrize("token", [70_000, -1])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(InputError, match=rf"{token} does not fit the uint16"):
        write(tmp_path / "c", [[1, token]])
    assert list(tmp_path.iterdir()) == []


def test_floating_point_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="float32"):
        IndexedWriter(tmp_path / "c", np.float32)


def test_unwritable_target_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "file" / "c", DOCUMENTS)


def test_best_dtype_is_megatrons() -> None:
    assert [best_dtype(vocab) for vocab in (257, 65_499, 65_500, 200_000)] == [
        np.uint16,
        np.uint16,
        np.int32,
        np.int32,
    ]


def merged(folder: Path, inputs: list[Path]) -> IndexedDataset:
    merge(inputs, folder / "all")
    return IndexedDataset(folder / "all")


@pytest.mark.parametrize("chunk", [8, 16, 2**20])
def test_merged_pairs_are_those_of_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    parts: list[list[list[int]]] = [[[5, 6], []], [[], [7], [8], [9], [4, 4]], [[]], [[1, 2, 3]]]
    write(tmp_path / "whole" / "c", [document for documents in parts for document in documents])
    # Files that are larger than what is copied at once.
    monkeypatch.setattr(indexed_writer, "_CHUNK_BYTES", chunk)
    for number, documents in enumerate(parts):
        write(tmp_path / f"in{number}", documents)
    (tmp_path / "README.md").write_text("not a pair")
    for inputs in ([tmp_path], [tmp_path / f"in{number}.idx" for number in range(4)]):
        summary = merge(inputs, tmp_path / "out" / "all")
        assert (summary.documents, summary.tokens) == (9, 10)
        for ending in ("bin", "idx"):
            expected = (tmp_path / "whole" / f"c.{ending}").read_bytes()
            assert (tmp_path / "out" / f"all.{ending}").read_bytes() == expected


def test_modes_are_merged_with_their_sequences(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [[1], [2, 3]])
        path = tmp_path / f"{name}.idx"
        path.write_bytes(path.read_bytes() + bytes([0, 1]))
    dataset = merged(tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert dataset.modes is not None and dataset.modes.tolist() == [0, 1, 0, 1]
    write(tmp_path / "plain", [[1]])
    with pytest.raises(InputError, match=r"a: has multimodal modes, but .*plain has none"):
        merged(tmp_path, [tmp_path / "a", tmp_path / "plain"])


def test_pairs_that_cannot_be_merged_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    write(tmp_path / "b", [[1]], np.int32)
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "c.bin").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    for inputs, message in (
        (["a", "b"], "b: holds int32 ids, but .*a uint16"),
        (["a", "none"], r"none\.idx: no such file"),
        (["empty"], "holds no .bin/.idx pairs"),
        (["half"], r"half: c\.bin is there without its \.idx"),
        (["a", "all"], "is one of the inputs|no such file"),
        ([], "--input: none given"),
    ):
        with pytest.raises(InputError, match=message):
            merged(tmp_path, [tmp_path / name for name in inputs])
    with pytest.raises(InputError, match="is one of the inputs"):
        merge([tmp_path / "a"], tmp_path / "a")
    assert sorted(tmp_path.iterdir()) == before
