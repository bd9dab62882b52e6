"""A line on the terminal that names a command's current work, once its answer takes more than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.status import Status

PATIENCE_S = 1.0
"""Seconds after which the line appears."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show the work `what` and its seconds on a terminal, from the first second on.

    The line is gone when the block ends, so that the answer stands alone.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    shown: list[Status] = []
    lock = Lock()
    over = False

    def show() -> None:
        from cli.status import Status  # Rich is loaded only to draw.

        with lock:
            if not over:
                shown.append(Status())
                shown[0].show(what)

    timer = Timer(PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
        for status in shown:
            status.clear()
