"""The folder of a run's checkpoints: `FOLDER/iter_0000100` each, and a file that names the newest.

A checkpoint is written into `iter_0000100.partial`. When all its files are on the disk the folder gets its
name, and then the tracker names it. So after a crash at any point, the last complete checkpoint is found.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from costmodels.errors import InputError
from costmodels.files import read_at_most
from costmodels.paths import entries, exists, is_folder
from runtime.checkpoint.files import sync_folder
from runtime.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    has_all_files,
    has_reader,
    manifest_text,
    record_file,
    record_of,
)
from runtime.checkpoint.run_file import RUN_FILE, run_text
from runtime.logs.console import say

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest complete checkpoint (Megatron-LM's name)."""

LARGEST_TRACKER = 1 << 16
"""Most bytes of the tracker; a larger file names no iteration."""

PARTIAL_SUFFIX = ".partial"
"""Suffix of folders that are being written or deleted; they are useless after a crash."""

REPLACED_SUFFIX = ".replaced"
"""Suffix of a checkpoint while another one of the same iteration replaces it."""

_ITERATION = re.compile(r"iter_(\d{7,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)

Result = TypeVar("Result")


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint (Megatron-LM's name)."""
    return Path(folder) / f"iter_{iteration:07d}"


def partial_folder(folder: str | Path, iteration: int) -> Path:
    """The folder in which an iteration's checkpoint is written before it gets its name."""
    target = iteration_folder(folder, iteration)
    return target.with_name(target.name + PARTIAL_SUFFIX)


def iterations(folder: str | Path) -> list[int]:
    """Iterations of the complete checkpoints in `folder`, ascending."""
    if not is_folder(folder):
        return []
    names = [path.name for path in entries(folder) if exists(path / MANIFEST)]
    numbers = [int(name[1]) for name in map(_ITERATION.fullmatch, names) if name]
    return sorted(number for number in numbers if iteration_folder(folder, number).name in names)


def latest_iteration(folder: str | Path) -> int | None:
    """Iteration of the newest complete checkpoint; None when there is none.

    Raises:
        InputError: the tracker names no iteration, or the folder cannot be read.
    """
    return _readable(Path(folder), lambda: _latest(Path(folder)))


def _latest(folder: Path) -> int | None:
    _put_back(folder)
    tracker = folder / TRACKER
    try:
        text = read_at_most(tracker, LARGEST_TRACKER).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        # A crash came between the name of the first checkpoint and the tracker.
        return max(iterations(folder), default=None)
    if not _NUMBER.fullmatch(text):
        raise InputError(f"{tracker}: {text[:80]!r} is not an iteration number; write the one to load")
    target = iteration_folder(folder, int(text))
    if not exists(target / MANIFEST):
        raise InputError(
            f"{tracker} names iteration {text}, but {target} holds no complete checkpoint; "
            f"{reload_advice(folder, int(text))}"
        )
    return int(text)


def iteration_to_load(folder: str | Path, step: int | None = None) -> int | None:
    """The iteration `step`, or the newest when it is None; None when there is no checkpoint at all.

    Raises:
        InputError: the checkpoint of `step` is missing, or the newest one differs from the tracker's.
    """
    if step is None:
        return latest_iteration(folder)
    there = _readable(Path(folder), lambda: iterations(folder))
    if step not in there:
        words = ", ".join(map(str, there)) or "none"
        raise InputError(f"--ckpt-step {step}: {folder} holds no such checkpoint; there are {words}")
    return step


def reload_advice(folder: Path, iteration: int) -> str:
    """Advice for the end of a message: how to continue without the checkpoint of `iteration`."""
    there = iterations(folder) if os.access(folder, os.R_OK | os.X_OK) else []
    whole = [i for i in there if i != iteration and has_all_files(iteration_folder(folder, i))]
    if not whole:
        return "there is no other one here: give another folder, or start anew without --load"
    newest = max((i for i in whole if i < iteration), default=max(whole))
    return f"go on from another one with --ckpt-step {newest}"


def _readable(path: Path, work: Callable[[], Result]) -> Result:
    try:
        return work()
    except OSError as error:
        raise InputError(f"{error.filename or path}: cannot be read ({error.strerror})") from None


def publish(
    folder: str | Path, iteration: int, run: Mapping[str, Any], files: Mapping[str, FileRecord]
) -> Path:
    """Make the contents of `partial_folder(folder, iteration)` the newest checkpoint; returns its folder.

    One process calls it when all `files` are on disk. Raises `OSError`.

    Args:
        run: the contents of run.json; see `RunFile`.
        files: records of the written files, by name; `file_records` reads them from disk.
    """
    target, partial = iteration_folder(folder, iteration), partial_folder(folder, iteration)
    for name in files:
        if not (partial / name).exists():
            what = "another rank wrote it, and the first does not see it: all nodes must share the folder"
            raise OSError(errno.ENOENT, what, str(partial / name))
    text = run_text(run).encode()
    _write(partial / RUN_FILE, text)
    _write(partial / MANIFEST, manifest_text({**files, RUN_FILE: record_of(text)}).encode())
    sync_folder(partial)
    replaced = target.with_name(target.name + REPLACED_SUFFIX)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    tracker = target.with_name(TRACKER)
    fresh = tracker.with_name(TRACKER + PARTIAL_SUFFIX)
    _write(fresh, str(iteration).encode())
    fresh.replace(tracker)
    sync_folder(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    return target


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Records of the files in `folder`, after flushing them to disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {path.name: record_file(path) for path in folder.iterdir()}


def clear_folder(folder: Path) -> None:
    """Make `folder`, and delete the remains of interrupted saves in it."""
    folder.mkdir(parents=True, exist_ok=True)
    _put_back(folder)
    # A replaced folder that is still here has a successor of its name, and is not needed.
    for ending in (PARTIAL_SUFFIX, REPLACED_SUFFIX):
        for path in folder.glob(f"iter_*{ending}"):
            shutil.rmtree(path)


def prune_checkpoints(folder: Path, newest: int, keep: int) -> None:
    """Delete checkpoints older than the last `keep` up to `newest`, except those that are being read.

    Checkpoints of later iterations stay, as a run that went back to an earlier one has yet to reach them.
    """
    for iteration in [i for i in iterations(folder) if i <= newest][:-keep]:
        target = iteration_folder(folder, iteration)
        if has_reader(target):
            continue
        try:
            # A crash while it is deleted must not leave half of it under its name.
            shutil.rmtree(target.rename(target.with_name(target.name + PARTIAL_SUFFIX)))
        except OSError as error:
            say(f"cannot delete checkpoint {target}: {error.strerror}", sys.stderr)


def _put_back(folder: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    for path in folder.glob(f"iter_*{REPLACED_SUFFIX}"):
        target = path.with_name(path.name.removesuffix(REPLACED_SUFFIX))
        if not target.exists():
            path.rename(target)


def _write(path: Path, data: bytes) -> None:
    """Write a small file to the disk; errors name it."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
