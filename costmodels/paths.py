"""Queries about paths, all in one place, so that a path without access ends in a one-line error."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from costmodels.errors import InputError

NOTHING = (errno.ENOENT, errno.ENOTDIR)
"""Error codes for a path where nothing exists."""

Result = TypeVar("Result")


def exists(path: str | Path) -> bool:
    """Return whether anything exists at a path; False for a broken link."""
    return _mode(path) is not None


def is_visible(path: str | Path) -> bool:
    """Return whether anything exists at a path; False for a path without access."""
    try:
        return exists(path)
    except InputError:
        return False


def is_file(path: str | Path) -> bool:
    """Return whether a path is a regular file."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def entries(folder: str | Path) -> list[Path]:
    """The contents of a folder, by name."""
    return seen(folder, lambda: sorted(Path(folder).iterdir()))


def file_bytes(path: str | Path) -> int:
    """Bytes of an existing file."""
    return seen(path, lambda: Path(path).stat().st_size)


def home_of(variable: str, default: str) -> Path:
    """The user's folder that an environment variable names (`XDG_CACHE_HOME`), or `default` in the home."""
    named = os.environ.get(variable)
    return Path(named) if named else home_folder() / default


def home_folder() -> Path:
    """The user's home; the current folder for a user without a home."""
    try:
        return Path.home()
    except RuntimeError:
        return Path()


def expanded(path: str | Path) -> Path:
    """A path with `~` replaced by the user's home; the name of an unknown user stays unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolved(path: str | Path) -> Path:
    """A path with all links resolved; a circle of links and a NUL character are wrong input."""
    return seen(path, lambda: Path(os.path.realpath(path)))


def seen(path: str | Path, look: Callable[[], Result]) -> Result:
    """The answer of `look` about a path.

    Raises `InputError`, which names the path, where the system cannot answer: a folder without access, a name
    that is too long, a circle of links, a failing disk.
    """
    try:
        return look()
    except OSError as error:
        raise InputError(
            f"{error.filename or path}: cannot be looked at ({error.strerror or error})"
        ) from None
    except ValueError:
        # A NUL, or what the encoding of file names does not hold.
        raise InputError(f"{str(path)!r} is no valid name of a file") from None


def _mode(path: str | Path) -> int | None:
    """The file mode at a path; None where nothing exists."""

    def look() -> int | None:
        try:
            return Path(path).stat().st_mode
        except OSError as error:
            if error.errno in NOTHING:
                return None
            raise

    return seen(path, look)
