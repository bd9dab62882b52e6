"""Folders that somebody else made: whatever their files say, nothing of it is run."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from costmodels.errors import InputError
from runtime import checkpoint
from runtime.checkpoint import metadata, reader
from runtime.checkpoint.manifest import manifest_text
from runtime.checkpoint.metadata import METADATA, Place, read_metadata
from runtime.huggingface.folder_kind import is_hugging_face
from runtime.huggingface.stored_model import StoredModel
from tests.fuzz import hostile, hostile_pickles
from tests.fuzz.valid_files import small_plan
from tests.support.commands import Command

DRAW = 5
"""Every so many of the files of `tests.fuzz` are read here."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint."""
    folder = tmp_path_factory.mktemp("hostile") / "checkpoint"
    hostile.write_checkpoint(folder)
    return folder


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    shutil.copytree(stored, tmp_path / "copy")
    return tmp_path / "copy"


def plant(folder: Path, canary: Path) -> None:
    """Hide a command in the metadata of a checkpoint, whose checksums agree."""
    iteration = folder / "iter_0000003"
    with (iteration / METADATA).open("wb") as file:
        file.write(hostile_pickles.dumped(hostile_pickles.call("posix", "system", canary)))
    (iteration / checkpoint.MANIFEST).unlink()
    records = checkpoint.file_records(iteration)
    (iteration / checkpoint.MANIFEST).write_text(manifest_text(records))


@pytest.mark.slow
def test_hostile_files_run_nothing_and_end_in_one_line(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    plan = small_plan()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, variant in enumerate(hostile.hostile(tmp_path, plan)):
            if number % DRAW and "NEWOBJ" not in variant.name:
                continue
            outcome, what = hostile.attack(variant, tmp_path / "read", tmp_path / hostile.CANARY)
            outcomes[outcome] += 1
            assert outcome in ("refused", "other"), f"{variant.name}: {what}"
    # A run that counts iterations by the billion is odd, no more.
    assert outcomes["refused"] > 60 and outcomes["other"] <= 2


def one_line_refuses(err: str) -> bool:
    """Return whether an output ends with one line of an error, after the phases of the command."""
    *phases, error = err.splitlines()
    return error.startswith("planner: error: ") and not any("rror" in line for line in phases)


def test_a_planted_command_does_run_where_it_is_unpickled(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    canary = tmp_path / hostile.CANARY
    for module, name in (("posix", "system"), ("builtins", "exec"), ("subprocess", "getoutput")):
        pickle.loads(hostile_pickles.dumped(hostile_pickles.call(module, name, canary)))
        assert canary.exists(), name
        canary.unlink()


@pytest.mark.parametrize(
    "command",
    ["convert --input {} --output {}/out", "generate --load {} --prompt a --tokenizer-type ByteTokenizer"],
)
def test_commands_refuse_a_checkpoint_with_a_planted_command(
    copy: Path, tmp_path: Path, command: str, planner_command: Command
) -> None:
    plant(copy, tmp_path / "canary")
    code, _, err = planner_command(*command.format(copy, tmp_path).split())
    assert code == 2 and one_line_refuses(err)
    assert ".metadata: not what PyTorch writes: it names 'posix.system'" in err
    assert not (tmp_path / "canary").exists()


def test_a_downloaded_model_with_a_tracker_in_it_is_refused(
    copy: Path, tmp_path: Path, planner_command: Command
) -> None:
    plant(copy, tmp_path / "canary")
    (copy / "config.json").write_text("{}")
    for command in (f"convert --input {copy} --output {tmp_path}/out", f"generate --load {copy} --prompt a"):
        code, _, err = planner_command(*command.split())
        assert code == 2 and one_line_refuses(err)
        assert f"{copy} holds both a Hugging Face model (config.json) and checkpoints" in err
    (copy / checkpoint.TRACKER).unlink()
    with pytest.raises(InputError, match="holds both a Hugging Face model"):
        StoredModel(copy)
    shutil.rmtree(copy / "iter_0000003")
    assert is_hugging_face(copy)


def test_pieces_that_many_tensors_share_are_not_made_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, pieces = torch.Size([1]), 100
    chunks = [ChunkStorageMetadata(torch.Size([i]), one) for i in range(pieces)]
    shared = TensorStorageMetadata(TensorProperties(), torch.Size([pieces]), chunks)
    places = {MetadataIndex("0", chunk.offsets): _StorageInfo("a", 0, 1) for chunk in chunks}
    theirs = Metadata({str(name): shared for name in range(1000)}, storage_data=places)
    (tmp_path / METADATA).write_bytes(pickle.dumps(theirs))
    made, make = Counter[str](), metadata._chunk
    monkeypatch.setattr(metadata, "_chunk", lambda *found: made.update(["piece"]) or make(*found))
    with pytest.raises(InputError, match="a piece of '1' lies nowhere"):
        read_metadata(tmp_path)
    assert made["piece"] == 2 * pieces


def test_a_piece_that_the_system_reads_in_parts_is_whole() -> None:
    """Linux reads at most 2 GiB at once."""
    whole = io.BytesIO()
    torch.save(torch.arange(9000), whole)

    class InParts(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:1000])

    found = reader._tensor(InParts(whole.getvalue()), Place("a", 0, len(whole.getvalue())))
    assert torch.equal(found, torch.arange(9000))


def test_metadata_is_read_as_pytorch_reads_it(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = read_metadata(stored / "iter_0000003")
    theirs: Metadata = pickle.loads((stored / "iter_0000003" / METADATA).read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    places = {index: tuple(place) for index, place in ours.storage_data.items()}
    assert places == {
        index: (place.relative_path, place.offset, place.length)
        for index, place in theirs.storage_data.items()
    }
    # As Python 3.11.0 to 3.11.3 pickle it.
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    (tmp_path / METADATA).write_bytes(pickle.dumps(theirs))
    assert b"getattr" in (tmp_path / METADATA).read_bytes()
    assert read_metadata(tmp_path) == ours
    tensors = StoredModel(stored)
    assert all(
        torch.equal(tensors.read_ours(name), torch.ones(shape)) for name, shape in tensors.shapes.items()
    )
