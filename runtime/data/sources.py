"""Files of raw text, compressed or not, from a name, a pattern or a folder."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from costmodels.errors import InputError
from costmodels.files import open_regular
from costmodels.paths import exists, file_bytes, is_file, is_folder, seen

_READ_BYTES = 2**20
# Largest window of `zstd --long=31`, with which the dumps of some large corpora are packed.
_ZSTD_WINDOW = 2**31


@dataclass(frozen=True)
class Source:
    """An open file: `text` gives its decompressed bytes; `taken` is the number of bytes read from disk."""

    text: IO[bytes]
    taken: Callable[[], int]


def expand(inputs: Sequence[str]) -> list[Path]:
    """The files that `inputs` name, each a file, a pattern, or a folder whose files are taken by path.

    In folders and their subfolders, empty files and names that start with a dot are skipped.

    Raises InputError if an input matches no file.
    """
    files: list[Path] = []
    for name in inputs:
        if not name:
            raise InputError("--input '': an empty name; name a file, a pattern or a folder")
        path = Path(name)
        if is_folder(path):
            found = [file for file in _files_below(path) if file_bytes(file)]
        elif exists(path):
            found = [path]
        else:
            found = [match for match in _matches(path) if not is_folder(match)]
        if not found:
            what = "holds no files" if is_folder(path) else "no such file"
            raise InputError(f"--input {name}: {what}")
        files += found
    if not files:
        raise InputError("--input: none given: name a file of JSON lines, a JSON array or plain text")
    return files


def _matches(pattern: Path) -> list[Path]:
    return seen(pattern, lambda: sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))))


def _files_below(folder: Path) -> list[Path]:
    """The files in a folder and in those below it; a folder that cannot be read raises `InputError`, as its
    text would be missing."""

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse)
    found = seen(folder, lambda: [Path(parent, name) for parent, _, names in walk for name in names])
    found = [path for path in found if is_file(path)]
    hidden = [any(part.startswith(".") for part in path.relative_to(folder).parts) for path in found]
    return sorted(path for path, is_hidden in zip(found, hidden, strict=True) if not is_hidden)


def bare_name(path: Path) -> Path:
    """A path without the suffix of its compression."""
    return path.with_suffix("") if path.suffix.lower() in _OPENERS else path


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a file to read it, decompressed if its name ends in .gz, .bz2, .xz or .zst.

    Raises InputError, here and inside the context, if it cannot be read, or is damaged or truncated.
    """
    opener = _OPENERS.get(path.suffix.lower())
    if opener is _open_zstd and find_spec("zstandard") is None:
        raise InputError(f"{path}: .zst files need the package zstandard: pip install zstandard")
    try:
        with open_regular(path) as file, io.BufferedReader(file, _READ_BYTES) as raw:  # type: ignore[type-var]
            if opener is None:
                yield Source(raw, raw.tell)
            else:
                with opener(raw) as text:
                    yield Source(text, raw.tell)
    except OSError as error:
        # Decompressors report damage by an error without a number.
        if error.errno is None:
            raise _damaged(path, error) from None
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except _DAMAGES as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: damaged or incomplete {path.suffix[1:]} file: {error}")


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a file of zstd frames; a damaged or truncated frame raises EOFError.

    The library's own reader treats any end of the file as the end of the text.
    """

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._errors: type[Exception] = zstandard.ZstdError
        self._started = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            read = self._rest() or self._raw.read(_READ_BYTES)
            if not read:
                if self._started and not self._frame.eof:
                    raise EOFError("it ends before the end of a frame")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._started = True
            try:
                self._ready = memoryview(self._frame.decompress(read))
            except self._errors as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _rest(self) -> bytes:
        rest: bytes = self._frame.unused_data if self._frame.eof else b""
        return rest


def _open_zstd(raw: IO[bytes]) -> IO[bytes]:
    import zstandard

    return io.BufferedReader(_ZstdFile(raw, zstandard), _READ_BYTES)


_OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
}

_DAMAGES = (EOFError, zlib.error, lzma.LZMAError)
