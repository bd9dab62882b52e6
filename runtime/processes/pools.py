"""Helper processes that import nothing from the working directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import (
    active_children,
    get_all_start_methods,
    get_context,
    parent_process,
    resource_tracker,
    set_start_method,
)
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from pathlib import Path
from threading import Thread
from typing import Any


@contextmanager
def among_pythons_own() -> Iterator[None]:
    """Change to the folder of Python's own library within this context.

    A spawned Python first imports modules from its start folder, then gets this process's path and changes to
    this process's folder.
    """
    before = Path.cwd()
    os.chdir(Path(os.__file__).parent)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Within this context start processes that ignore Ctrl-C; here Ctrl-C is delayed.

    A terminal sends it to all processes, but this process should end the others, which would print
    tracebacks.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def brief_pool(processes: int, context: BaseContext | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end at once when this process ends, even during work.

    Args:
        context: `spawn_context` unless given.
    """
    others = active_children()
    pool = ProcessPoolExecutor(processes, mp_context=context or spawn_context(), initializer=_ready)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        workers = [process for process in active_children() if process not in others]
        for process in workers:
            process.terminate()
        for process in workers:
            process.join()


def _ready() -> None:
    """Prepare a process of a pool: it ends with the process that started the pool, however that ends.

    A process that is killed, or that Ctrl-C ends during an import, does not clean up. Locks that this process
    makes have no name on the system, so that none is left when it is ended: PyTorch's progress bars make a
    lock where tqdm is installed, and Python warns of names that are left.
    """
    parent = parent_process()
    assert parent is not None
    Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
    if "fork" in get_all_start_methods():
        set_start_method("fork", force=True)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with among_pythons_own(), deaf_to_ctrl_c():
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class _Context(SpawnContext):
    Process = _Process


def spawn_context() -> SpawnContext:
    """A multiprocessing context with new processes, as threads of PyTorch do not survive a fork."""
    with among_pythons_own():
        # A Python of its own too, which the first lock would start.
        resource_tracker.ensure_running()
    return _Context()


def default_context() -> BaseContext:
    """A multiprocessing context with the system's default: forked processes on some systems, new ones on
    others."""
    context = get_context()
    return context if context.get_start_method() == "fork" else spawn_context()
