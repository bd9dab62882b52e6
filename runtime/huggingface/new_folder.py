"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from costmodels.errors import InputError
from runtime.files import sync_folder


@contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """Gives a folder to write in, which becomes `path` when the block ends without an error.

    What a process that was killed left of an earlier one is removed first.

    Raises:
        InputError: `path` holds something, or it cannot be written; the line names `flag`.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{flag} {path}: exists already; name a new folder, or remove it first")
    partial = path.with_name(path.name + ".partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        for folder, _, _ in os.walk(partial):
            sync_folder(Path(folder))
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        file = "" if error.filename is None else f"{error.filename}: "
        raise InputError(f"{flag} {path}: cannot be written: {file}{error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
