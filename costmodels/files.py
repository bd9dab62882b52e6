"""Reading of files up to a size, and atomic writing: a reader sees the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from costmodels.errors import InputError

MIB = 1 << 20


@contextlib.contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for unbuffered reading.

    Raises `OSError` for a file that is not regular, as a pipe would block and some devices have no end.
    """
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError:
        # A NUL in the name.
        raise OSError(errno.EINVAL, "no valid name of a file", repr(str(path))) from None
    with os.fdopen(number, "rb", buffering=0) as file:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        yield file


def read_at_most(path: str | Path, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes; raises `OSError` for any other file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {size_text(most)}", str(path))
        parts = []
        left = most + 1
        # One that grows meanwhile ends, too.
        while left > 0 and (part := file.read(min(left, 16 * MIB))):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it is larger than {size_text(most)}", str(path))
    return b"".join(parts)


def read_text(path: str | Path, most: int, encoding: str = "utf-8") -> str:
    """The text of a regular file of at most `most` bytes; raises `OSError` and `UnicodeDecodeError`."""
    return read_at_most(path, most).decode(encoding)


def size_text(count: int) -> str:
    """A size limit in words, such as `64 MiB` or `64 bytes`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} bytes"


def write_whole(what: str, path: str | Path, text: str) -> None:
    """Write `text` to a file atomically; on failure the old file stays.

    Links and devices are written through. Raises `InputError` with `what` and the file when it cannot be
    written.
    """
    target = Path(path)
    try:
        if _is_written_through(target):
            _write_through(target, text.encode())
            return
        beside = name_beside(target)
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{what} {shown_path(path)}: cannot be written: {reason}") from None
    except ValueError:
        # A NUL, or what UTF-8 or the encoding of file names does not hold.
        raise InputError(
            f"{what} {shown_path(path)}: cannot be written: its name or text is not valid"
        ) from None


def shown_path(path: str | Path) -> str:
    """A path for a one-line message, quoted if it contains line breaks."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def name_beside(target: Path) -> Path:
    """A temporary name beside `target`, not derived from its name, which may already have the greatest
    length."""
    number = zlib.crc32(os.fsencode(target.name))
    return target.with_name(f".planner-{os.getpid()}-{number:08x}")


def _is_written_through(target: Path) -> bool:
    """Return whether a path is a link, a pipe or a device, which must stay when it is written to."""
    try:
        mode = os.lstat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not stat.S_ISREG(mode)


def _write_through(target: Path, data: bytes) -> None:
    """Write through a link, or to a pipe or device; raises `OSError` for a pipe without a reader, and for a
    disk."""
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(target, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is a pipe that nobody reads, or no file") from None
        raise
    with os.fdopen(number, "wb") as file:
        mode = os.fstat(number).st_mode
        if stat.S_ISBLK(mode):
            raise OSError(errno.EINVAL, "it is a disk, not a file")
        if stat.S_ISREG(mode):
            os.ftruncate(number, 0)
        os.set_blocking(number, True)
        file.write(data)
