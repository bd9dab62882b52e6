"""Lines for people: a full disk or a reader that went away must not end a run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once, to standard output unless another `stream` is given; drop it if that fails."""
    target = sys.stdout if stream is None else stream
    try:
        print(text, file=target, flush=True)
    except OSError:
        _forget(target)


def flush() -> None:
    """Pass on what is still buffered, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _forget(stream)


def _forget(stream: TextIO) -> None:
    """Drop what a stream could not write, which it would otherwise try again, and fail at, forever."""
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
