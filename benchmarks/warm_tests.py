"""Runs tests of a copy of this tree in forks of one process, as the import of PyTorch takes most of a short
run.

The process imports packages that no change of the tree affects. A fork of it imports the packages of the
tree. Before it runs tests, it forks a server process from which the ranks of tests are forked.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

PACKAGES = ("costmodels", "planner", "runtime", "cli", "tests", "benchmarks")
"""The top-level packages of the tree."""

IMPORTED = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "pytest",
)

HANGS_S = 900.0
"""Seconds after which tests count as hanging, much longer than any test takes."""

FAILED = 1
"""Exit code of pytest where tests failed."""


class WarmTests:
    """Runs tests of the tree `root`, in one process, until the first one fails."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, 0
        os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        for name in IMPORTED:
            importlib.import_module(name)

    def __call__(self, words: str) -> tuple[int, str]:
        """The exit code of pytest, and the tests that failed."""
        self.runs += 1
        log = self.root.parent / f"output-{self.runs}"
        pid = os.fork()
        if not pid:
            os.setsid()
            _run(self.root, words, log)
        code = _end_of(pid)
        if code is None:
            return FAILED, f"{words} hangs"
        failed = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", log.read_text(errors="replace"), re.MULTILINE)
        return code, ", ".join(failed) or words


def _end_of(pid: int) -> int | None:
    """The exit code of a process; None if it hangs, and then it is ended with its children."""
    until = time.monotonic() + HANGS_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _run(root: Path, words: str, log: Path) -> None:
    """Run tests in this process."""
    code = 70
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
        os.dup2(1, 2)
        os.chdir(root)
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        importlib.invalidate_caches()
        sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", os.fspath(_HERE)))]
        sys.dont_write_bytecode = True
        with _forked_server():
            pool = importlib.import_module("tests.support.worker_pool")
            pool.forkserver()
            for name in pool.PRELOADED:
                importlib.import_module(name)
            forkserver.ensure_running()
        arguments = ["-x", "-n", "0", "-p", "no:cacheprovider", "-rf", "--tb=short", *words.split()]
        code = int(importlib.import_module("pytest").main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


_HERE = Path(__file__).parents[1]


@contextmanager
def _forked_server() -> Iterator[None]:
    """Make the server of forked processes a fork of this process, instead of a new interpreter."""
    module: Any = util
    spawn = module.spawnv_passfds

    def start(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
        if "forkserver" not in arguments[-1]:
            pid: int = spawn(path, arguments, kept)
            return pid
        pid = os.fork()
        if pid:
            return pid
        try:
            for fd in range(3, 1024):
                if fd not in kept:
                    with suppress(OSError):
                        os.close(fd)
            exec(arguments[-1], {})
        finally:
            os._exit(1)

    module.spawnv_passfds = start
    try:
        yield
    finally:
        module.spawnv_passfds = spawn
