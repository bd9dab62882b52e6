"""Jobs of `runtime.pretrain` in their own processes: under torchrun, or forked from one that imported it.

A start under torchrun spends ten seconds and more with imports. The launcher of a forked job is itself
forked from the process that forks the ranks of worker pools.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runtime.launch.fork_server import run as fork_ranks
from runtime.processes.children import children
from tests.support import ROOT
from tests.support.worker_pool import forkserver

GRACE_S = 5.0
"""Seconds that ranks have to end after SIGTERM."""


class RunningJob:
    """A launcher and its ranks; what they print goes to `log`."""

    def __init__(
        self, launcher: subprocess.Popen[bytes] | multiprocessing.process.BaseProcess, log: Path
    ) -> None:
        self.process, self.log = launcher, log
        assert launcher.pid is not None
        self.launcher: int = launcher.pid
        self.known: set[int] = {launcher.pid}

    def ranks(self) -> list[int]:
        """Processes of the ranks that run now, in the order of their starts."""
        running = [pid for pid in children(self.launcher) if is_alive(pid)]
        self.known.update(running)
        return running

    def has_ended(self) -> bool:
        """Return whether the launcher has ended."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is not None
        return not self.process.is_alive()

    def exit_code(self) -> int:
        """Wait for the launcher; negative where a signal ended it."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def output(self) -> str:
        """The output of launcher and ranks so far."""
        return self.log.read_text()

    def left_over(self) -> list[int]:
        """Processes of the job that still run."""
        return [pid for pid in self.known if is_alive(pid)]

    def end(self) -> None:
        """Kill what runs, of a job that is no longer needed."""
        for pid in [*self.ranks(), self.launcher]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.exit_code()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    below = children(pid)
    return below + [lower for child in below for lower in descendants(child)]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    if sys.platform == "linux":
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
            return state != b"Z"
        return False
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listing.returncode == 0 and not listing.stdout.startswith("Z")


def under_torchrun(arguments: Sequence[str | Path], ranks: int, log: Path) -> RunningJob:
    """Start a job under torchrun; what it prints goes to `log`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            [*command, "-m", "runtime.pretrain", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RunningJob(launcher, log)


def forked(arguments: Sequence[str | Path], ranks: int, log: Path) -> RunningJob:
    """Start a job from a process that has imported all it needs; what it prints goes to `log`."""
    process = forkserver().Process(target=_launch, args=(list(map(str, arguments)), ranks, str(log)))
    process.start()
    return RunningJob(process, log)


def _write_into(log: str) -> None:
    """Send what this process and its children print to a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(handle, stream.fileno())
    os.close(handle)


def _launch(arguments: list[str], ranks: int, log: str) -> None:
    """Run the job; in the launcher."""
    import torch

    gc.freeze()
    _write_into(log)
    torch.set_num_threads(1)
    os._exit(fork_ranks(ranks, arguments, GRACE_S))
