"""Processes that share modules which one process has loaded."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_all_start_methods, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

from runtime.processes.pools import among_pythons_own, deaf_to_ctrl_c, spawn_context

if sys.platform != "win32":
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    class _Process(ForkServerProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Any:
            with deaf_to_ctrl_c():
                return ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]

    class _Context(ForkServerContext):
        Process = _Process


@contextmanager
def preloading(modules: Sequence[str]) -> Iterator[BaseContext]:
    """A context whose processes are forked from one that loads `modules`, where the system has such.

    The loading starts at once, beside this process's work. The modules must not start threads when they are
    loaded, as a fork has none of them.
    """
    if sys.platform == "win32" or "forkserver" not in get_all_start_methods():
        yield spawn_context()
        return
    from multiprocessing import forkserver

    # Nothing public ends the server.
    server = vars(forkserver)["_forkserver"]
    if server._forkserver_pid is not None:
        # Somebody else's server has loaded other modules.
        yield spawn_context()
        return
    before = server._preload_modules
    server.set_forkserver_preload(list(modules))
    try:
        with among_pythons_own():
            # Its first start would end this process's deafness.
            resource_tracker.ensure_running()
        with among_pythons_own(), deaf_to_ctrl_c(), suppress(OSError):
            # Its socket may have too long a path, or no place on the disk.
            server.ensure_running()
        yield spawn_context() if server._forkserver_pid is None else _Context()
    finally:
        server.set_forkserver_preload(before)
        if server._forkserver_pid is not None:
            # It may still be loading.
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
