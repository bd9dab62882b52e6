"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from costmodels.errors import InputError
from costmodels.paths import entries, exists, is_folder
from runtime.checkpoint.files import sync_folder
from runtime.checkpoint.owner import OWNER, Owner


@contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """A context with a temporary folder, which becomes `path` when the block ends without an error.

    One process at a time writes it; remains of a killed process are removed first.

    Raises:
        InputError: `path` is not empty, another process writes it, or it cannot be written; the line names
            `flag`.
    """
    check_new(path, flag)
    partial = path.with_name(path.name + ".partial")
    owner = Owner(partial, f"{flag} {path}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        owner.acquire()
    except OSError as error:
        raise _refusal(path, flag, error) from error
    try:
        # Another process may have been writing it until now.
        check_new(path, flag)
        for left in partial.iterdir():
            if left.name != OWNER:
                shutil.rmtree(left) if is_folder(left) and not left.is_symlink() else left.unlink()
        yield partial
        for folder, _, _ in os.walk(partial):
            sync_folder(Path(folder))
        partial.replace(path)
        # Not before: without it another process would take the folder for its own.
        (path / OWNER).unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise _refusal(path, flag, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        owner.close()


def check_new(path: Path, flag: str) -> None:
    """Raise `InputError`, which names `flag`, where `path` is not empty."""
    if exists(path) and not (is_folder(path) and not entries(path)):
        raise InputError(f"{flag} {path}: exists already; name a new folder, or remove it first")


def _refusal(path: Path, flag: str, error: OSError) -> InputError:
    file = "" if error.filename is None else f"{error.filename}: "
    return InputError(f"{flag} {path}: cannot be written: {file}{error.strerror or error}")
