"""Processes beside this one that import nothing from the working directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any


@contextmanager
def _among_pythons_own() -> Iterator[None]:
    """Work in the folder of Python's own library meanwhile.

    A spawned Python looks for modules where it is started, until it has been told this process's path; then
    it goes to this process's folder.
    """
    before = Path.cwd()
    os.chdir(Path(os.__file__).parent)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start processes meanwhile that Ctrl-C passes by; here it waits.

    A terminal sends it to all of them: this one is to end the others, which would end in tracebacks.
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
def brief_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of so many processes, which end at once when this does, whatever they work on."""
    others = active_children()
    pool = ProcessPoolExecutor(processes, mp_context=spawn_context())
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        workers = [process for process in active_children() if process not in others]
        for process in workers:
            process.terminate()
        for process in workers:
            process.join()


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _among_pythons_own(), _deaf_to_ctrl_c():
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class _Context(SpawnContext):
    Process = _Process


def spawn_context() -> SpawnContext:
    """A context for processes that begin anew: threads of PyTorch do not survive a fork."""
    with _among_pythons_own():
        # A Python of its own too, which the first lock would start.
        resource_tracker.ensure_running()
    return _Context()


def default_context() -> BaseContext:
    """A context for processes that are forked where that is this system's way, and begin anew elsewhere."""
    context = get_context()
    return context if context.get_start_method() == "fork" else spawn_context()
