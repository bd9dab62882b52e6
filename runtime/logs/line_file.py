"""Files with one JSON object per line, to which a run appends whole lines; a full disk does not end the
run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from costmodels.files import read_at_most
from runtime.logs.console import say

LARGEST_LOG = 1 << 32


class LineFile:
    """A file to which lines are appended. Lines that cannot be written are dropped, with one warning until
    writing works again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor: int | None = None
        self.lost = 0
        with self._forgiving():
            self._open()

    def write(self, line: str) -> None:
        """Append a line and flush it."""
        with self._forgiving():
            descriptor = self._open()
            data = line.encode() + b"\n"
            before = os.fstat(descriptor).st_size
            try:
                written = os.write(descriptor, data)
                if written < len(data):
                    os.write(descriptor, data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
            if self.lost:
                say(f"{self.path} is written again; {self.lost} lines are missing", sys.stderr)
                self.lost = 0

    def close(self) -> None:
        """Close the file."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = None

    def _open(self) -> int:
        if self.descriptor is None:
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        return self.descriptor

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.lost:
                say(
                    f"warning: {self.path} cannot be written ({error.strerror}); the run goes on without",
                    sys.stderr,
                )
            self.lost += 1


def keep_lines(path: Path, iteration: int) -> None:
    """Keep the records in `path` up to this iteration; a new run (0) keeps none.

    If the file cannot be written it stays unchanged, with a warning.
    """
    fresh = path.with_name(path.name + ".partial")
    try:
        kept = [record for record in read_lines(path) if 0 < iteration >= record["iteration"]]
        fresh.write_text("".join(json.dumps(record) + "\n" for record in kept))
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        say(f"warning: {path} cannot be written ({error.strerror}); the run goes on without", sys.stderr)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without incomplete lines; empty when there is no file."""
    try:
        return list(parsed_lines(read_at_most(path, LARGEST_LOG)))
    except FileNotFoundError:
        return []
    except OSError as error:
        say(f"warning: {path} cannot be read ({error.strerror}); the run goes on without", sys.stderr)
        return []


def parsed_lines(text: bytes) -> Iterator[dict[str, Any]]:
    """The records in `text`, without incomplete lines."""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            yield record
