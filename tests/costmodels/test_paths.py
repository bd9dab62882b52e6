"""Functions that look at paths, where a user may look and where not."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from costmodels import paths
from costmodels.errors import InputError
from costmodels.files import write_whole
from tests.support import ROOT
from tests.support.ordinary_user import as_ordinary_user, can_be_ordinary

LOOKS: tuple[Callable[[Path], object], ...] = (
    paths.exists,
    paths.is_file,
    paths.is_folder,
    paths.entries,
    paths.file_bytes,
)

BY_ITSELF = ("exists", "is_file", "is_dir", "expanduser", "home")
"""Methods of `Path` that look by themselves, and raise the system's errors."""

INSIDE = {
    "costmodels/cache_files.py",
    "costmodels/catalogue/local_machine.py",
    "costmodels/paths.py",
    "runtime/checkpoint/folders.py",
    "runtime/checkpoint/manifest.py",
    "runtime/launch/supervisor.py",
    "runtime/launch/torchrun.py",
}
"""Modules that look at files of the system or of their own making, and see to errors themselves."""


def test_only_one_module_looks_at_paths() -> None:
    found = set()
    for package in ("cli", "planner", "costmodels", "runtime"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                called = node.func if isinstance(node, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr in BY_ITSELF:
                    found.add(file.relative_to(ROOT).as_posix())
    assert found <= INSIDE


def test_what_is_there_is_told_from_what_is_not(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("four")
    folder.mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    told = {
        path.name: (paths.exists(path), paths.is_file(path), paths.is_folder(path))
        for path in (
            file,
            folder,
            tmp_path / "dangling",
            tmp_path / "pipe",
            file / "below",
            tmp_path / "none",
        )
    }
    assert told == {
        "file": (True, True, False),
        "folder": (True, False, True),
        "dangling": (False, False, False),
        "pipe": (True, False, False),
        "below": (False, False, False),
        "none": (False, False, False),
    }
    assert [path.name for path in paths.entries(tmp_path)] == ["dangling", "file", "folder", "pipe"]
    assert paths.file_bytes(file) == 4


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize(
    "name", ["x" * 300, "loop", "a\0b", "\udcff\ud800"], ids=["long", "loop", "NUL", "half"]
)
def test_a_path_that_no_system_has_is_wrong_input(
    tmp_path: Path, look: Callable[[Path], object], name: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"cannot be looked at \(|is no valid name"):
        look(tmp_path / name)


def test_an_ordinary_user_is_told_which_folder_is_closed(tmp_path: Path) -> None:
    if not can_be_ordinary():
        pytest.skip("root here cannot give up its privileges")
    closed = tmp_path / "closed"
    (closed / "below").mkdir(parents=True)
    closed.chmod(0)

    def look() -> None:
        for one in LOOKS:
            with pytest.raises(
                InputError, match=r"closed/below.*: cannot be looked at \(Permission denied\)"
            ):
                one(closed / "below")
        assert not paths.is_visible(closed / "below")
        with pytest.raises(InputError, match=r"plan .*: cannot be written: Permission denied"):
            write_whole("plan", closed / "plan.json", "{}")

    try:
        assert as_ordinary_user(look) == 0
    finally:
        closed.chmod(0o700)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path


def test_a_pipe_that_nobody_reads_is_not_waited_for(pipe: Path) -> None:
    with pytest.raises(InputError, match=r"^plan .*: cannot be written: it is a pipe that nobody reads"):
        write_whole("plan", pipe, "{}")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole("plan", pipe, "{}")
        assert os.read(reader, 10) == b"{}"
    finally:
        os.close(reader)


@pytest.mark.parametrize("name", ["x" * 300, "folder", "file/below", "a\0b", "loop"])
def test_a_target_that_cannot_be_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"^plan .*: cannot be written: "):
        write_whole("plan", tmp_path / name, "{}")
    assert sorted(tmp_path.iterdir()) == before


def test_the_longest_name_that_files_have_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_whole("plan", path, "{}")
    link = tmp_path / "link"
    link.symlink_to(path)
    write_whole("plan", link, "[1]")
    write_whole("plan", link, "[]")
    assert path.read_text() == "[]" and link.is_symlink()
