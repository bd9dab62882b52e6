"""Ctrl-C during imports; importing PyTorch takes seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

EXIT_CODE = 128 + signal.SIGINT


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Within this context Ctrl-C ends the process at once and prints nothing.

    An exception in a half-imported module would come out as a traceback, or be caught by the module.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() != main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_CODE))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
