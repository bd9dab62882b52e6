"""A cache that cannot be read is removed, said once, and made again."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from costmodels import cache_files
from costmodels.cache_files import read_cached, write_cached
from costmodels.catalogue.parsed_files import parsed_file
from costmodels.catalogue.yaml_files import parse

DAMAGES: dict[str, Callable[[Path], object]] = {
    "not what it was": lambda path: path.write_bytes(b"\0garbage" * 99),
    "empty": lambda path: path.write_bytes(b""),
    "too large": lambda path: path.write_bytes(bytes(2000)),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a circle": lambda path: path.symlink_to(path.name),
}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "_said", set())


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_file_is_removed_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    path = tmp_path / "kept"
    assert read_cached(path, 1000, marshal.loads) is None
    assert capsys.readouterr().err == ""
    for _ in range(2):
        damage(path)
        assert read_cached(path, 1000, marshal.loads) is None
        assert not os.path.lexists(path)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"planner: note: {path}: removed, as it cannot be read (")
    write_cached(path, marshal.dumps([1]))
    assert read_cached(path, 1000, marshal.loads) == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        write_cached(tmp_path / "file" / "kept", b"1")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be kept (File exists)" in said


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_parsed_file_that_is_damaged_is_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    source = tmp_path / "a.yaml"
    source.write_text("name: one")
    kept = Path(cache_from_source(str(source))).with_suffix(".yaml")
    assert parsed_file(source, parse) == {"name": "one"} and kept.is_file()
    whole = kept.read_bytes()
    kept.unlink()
    damage(kept)
    assert parsed_file(source, parse) == {"name": "one"}
    # One bit, which marshal might take for something else or die of.
    kept.unlink(missing_ok=True)
    kept.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    assert parsed_file(source, parse) == {"name": "one"}
    assert parsed_file(source, lambda text, name: {}) == {"name": "one"}
