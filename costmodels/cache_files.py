"""Files of a cache, which may be damaged: an unreadable file is removed, reported once, and made again."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from costmodels.errors import on_one_line
from costmodels.files import name_beside, read_at_most

Content = TypeVar("Content")

_said: set[str] = set()


def read_cached(path: Path, most: int, parse: Callable[[bytes], Content]) -> Content | None:
    """The content that `parse` makes of a cache file of at most `most` bytes; None without a readable file.

    Any error of `parse` means that the file is damaged.
    """
    try:
        return parse(read_at_most(path, most))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        discard_cached(path, error)
        return None


def discard_cached(path: Path, why: Exception) -> None:
    """Remove an unreadable file or folder of a cache, and report it once.

    If it cannot be removed either, the cache is not used.
    """
    reason = f"{type(why).__name__}: {why.strerror if isinstance(why, OSError) else why}"
    try:
        is_folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
        what = "removed, as it cannot be read"
    except OSError as error:
        what = f"cannot be read, nor removed ({error.strerror}), and is done without"
    say_once(f"{path}: {what} ({reason})")


def write_cached(path: Path, data: bytes, quietly: bool = False) -> None:
    """Write `data` to a cache file; readers never see a part of it. A failure is reported once, or not at all
    with `quietly`, as many users meet it in a package that somebody else has installed."""
    beside = name_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if not quietly:
            say_once(f"{path}: cannot be kept ({error.strerror}); it is made anew each time")


def say_once(line: str) -> None:
    """Print a note on stderr, once in the life of a process."""
    text = on_one_line(ValueError(line))
    if text in _said or sys.stderr is None:
        return
    _said.add(text)
    with contextlib.suppress(OSError, ValueError):
        print(f"planner: note: {text}", file=sys.stderr, flush=True)
