"""Checksums of a checkpoint's files, so that an error names a file that differs from the written one.

`manifest.json` lists the length and the CRC-32 of every other file. The checksums are of the bytes before
writing, so later losses and changes on disk are found. A single changed bit is always found.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costmodels.errors import InputError
from costmodels.files import open_regular, read_at_most

if os.name == "posix":
    import fcntl

MANIFEST = "manifest.json"
"""The last written file; a folder without it has no complete checkpoint."""

BLOCK_BYTES = 1 << 22
"""Bytes that are read at a time."""

LARGEST_MANIFEST = 1 << 28
"""Most bytes of a manifest; enough for a million files."""

_FILE_NAME = re.compile(r"\.?\w[\w.-]*", re.ASCII)


class FileRecord(BaseModel):
    """Bytes and checksum of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: Annotated[int, Field(ge=0)]
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class Manifest(BaseModel):
    """The files of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: dict[str, FileRecord]
    crc32: str
    """The CRC-32 of `files` as JSON."""


def checksum_text(crc: int) -> str:
    """A CRC-32 as manifests spell it."""
    return f"{crc:08x}"


def record_of(data: bytes) -> FileRecord:
    """The record of a file that holds `data`."""
    return FileRecord(bytes=len(data), crc32=checksum_text(zlib.crc32(data)))


def manifest_text(files: Mapping[str, FileRecord]) -> str:
    """The contents of a manifest of `files`."""
    plain = {name: files[name].model_dump() for name in sorted(files)}
    return json.dumps({"files": plain, "crc32": _crc_of(plain)}, indent=1)


def _crc_of(files: Mapping[str, Mapping[str, object]]) -> str:
    return checksum_text(zlib.crc32(json.dumps(files, sort_keys=True).encode()))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        text = read_at_most(path, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise InputError(f"{folder} holds no complete checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError:
        raise damage_error(path, "is not a list of files") from None
    plain = {name: record.model_dump() for name, record in manifest.files.items()}
    if _crc_of(plain) != manifest.crc32 or not all(map(_FILE_NAME.fullmatch, plain)):
        raise damage_error(path, "differs from what was saved")
    return manifest


def damage_error(path: Path, how: str) -> InputError:
    """The error for a damaged file of a checkpoint."""
    return InputError(f"{path}: the file is damaged: it {how}")


def record_file(path: Path) -> FileRecord:
    """The record of the file at `path`."""
    crc = size = 0
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileRecord(bytes=size, crc32=checksum_text(crc))


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise `InputError` that names the first of `files` that is missing in `folder` or has changed."""
    for name, record in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            found = record_file(path) if size == record.bytes else None
        except FileNotFoundError:
            raise InputError(f"{path}: the file is missing") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        if found is None:
            raise damage_error(path, f"has {size} of the {record.bytes} bytes that were saved")
        if found != record:
            raise damage_error(path, "differs from what was saved")


def verify(folder: str | Path) -> Manifest:
    """Read all files of the checkpoint in `folder` and compare them with the saved checksums.

    It needs no process group, and none of the files is unpickled.

    Args:
        folder: the folder of one iteration, such as `checkpoints/iter_0000100`.

    Raises:
        InputError: it names the first file that is missing or damaged.
    """
    manifest = read_manifest(Path(folder))
    check_files(Path(folder), manifest.files)
    return manifest


def has_all_files(folder: Path) -> bool:
    """Return whether all files of a checkpoint exist with their lengths; their contents are not read."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == record.bytes for name, record in files.items())
    except (InputError, OSError):
        return False


@contextmanager
def reader_lock(folder: Path) -> Iterator[None]:
    """Within this context a run with --keep-last does not delete the checkpoint in `folder`."""
    with _locked(folder, exclusive=False):
        yield


def has_reader(folder: Path) -> bool:
    """Return whether a process is reading the checkpoint in `folder`."""
    try:
        with _locked(folder, exclusive=True):
            return False
    except BlockingIOError:
        return True


@contextmanager
def _locked(folder: Path, exclusive: bool) -> Iterator[None]:
    """Hold a lock of the manifest, if the system and the file system support locks."""
    path = folder / MANIFEST
    try:
        # A pipe would be waited for.
        file = path.open("r+b" if exclusive else "rb") if path.is_file() else None
    except OSError:
        file = None
    if file is None:
        yield
        return
    with file:
        if os.name == "posix":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
            except BlockingIOError:
                raise
            except OSError:
                pass
        yield
