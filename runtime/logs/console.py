"""Console output; a full disk or a closed pipe must not end a run."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

PROGRESS = re.compile(r"runtime: (.+) \.\.\.")
"""Pattern of a line of `progress`; its group is the current work."""

listener: Callable[[str, bool], None] | None = None
"""A function that also gets each message of this process, with True for errors; it writes the rank's file."""

_told: set[str] = set()
"""Streams whose write errors have been reported."""


class UnfailingStream:
    """A text stream that drops what it cannot write, and says so once on standard error."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        """None where it was closed before the process began."""

    def write(self, text: str) -> int:
        """Write `text`, with escapes for letters that the stream's encoding lacks."""
        if self.stream is not None:
            with self._forgiving(self.stream):
                try:
                    self.stream.write(text)
                except UnicodeEncodeError:
                    encoding = self.stream.encoding
                    self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        if self.stream is not None:
            with self._forgiving(self.stream):
                self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextlib.contextmanager
    def _forgiving(self, stream: TextIO) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            _forget(stream)
            _tell(stream, error)


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print at once, by default to standard output; output that cannot be written is dropped."""
    target = UnfailingStream(sys.stdout if stream is None else stream)
    target.write(text + end)
    target.flush()
    note(text, stream is sys.stderr and not PROGRESS.fullmatch(text))


def note(text: str, is_error: bool = False) -> None:
    """Write `text` only to the file of this rank, if it has one."""
    global listener
    if listener is not None:
        # Errors of the listener are said, and must not come here again.
        hears, listener = listener, None
        try:
            hears(text, is_error)
        finally:
            listener = hears


def progress(what: str) -> None:
    """Report the current work on standard error; a launcher decides how to show it."""
    say(f"runtime: {what} ...", sys.stderr)


def flush() -> None:
    """Flush buffered output as far as possible."""
    for stream in (sys.stdout, sys.stderr):
        UnfailingStream(stream).flush()


def _tell(stream: TextIO, error: Exception) -> None:
    """Report a failing stream once; a failure of standard error cannot be reported."""
    name = "standard output" if stream is sys.stdout else str(getattr(stream, "name", "a stream"))
    if stream is sys.stderr or name in _told:
        return
    _told.add(name)
    why = error.strerror if isinstance(error, OSError) else error
    say(f"warning: {name} cannot be written ({why}); the job goes on", sys.stderr)


def _forget(stream: TextIO) -> None:
    """Drop the buffer that a stream could not write, as the stream would otherwise retry it without end."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = stream.fileno()
        kept = os.dup(descriptor)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, descriptor)
            stream.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(nowhere)
