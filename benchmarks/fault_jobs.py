"""Jobs of `runtime.pretrain` to be killed: under torchrun, or forked from a process that has imported it.

A restart under torchrun spends ten seconds and more with imports, and `planner launch` a few. The launcher of
forked jobs is itself forked from a process that has imported all.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.launch.forked import IMPORTED
from runtime.launch.forked import run as fork_ranks

ROOT = Path(__file__).parents[1]

PRELOADED = [*IMPORTED, "runtime.checkpoint", "runtime.job.pretrained", "runtime.parallel.pipeline"]

GRACE_S = 5.0
"""Seconds that ranks have to end after SIGTERM."""


class RunningJob:
    """A launcher and its ranks."""

    def __init__(self, launcher: subprocess.Popen[bytes] | multiprocessing.process.BaseProcess) -> None:
        self.process = launcher
        assert launcher.pid is not None
        self.launcher: int = launcher.pid
        self.known: set[int] = {launcher.pid}

    def ranks(self) -> list[int]:
        """Processes of the ranks that run now, in the order of their starts."""
        found = children(self.launcher)
        self.known.update(found)
        return found

    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
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

    def left_over(self) -> list[int]:
        """Processes of the job that still run."""
        return [pid for pid in self.known if is_alive(pid)]

    def end(self) -> None:
        """Kill what runs, for a benchmark that stops early."""
        for pid in [*self.ranks(), self.launcher]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.exit_code()


def children(pid: int) -> list[int]:
    """Processes that `pid` has started, oldest first."""
    found = [number for number, state, parent in _processes() if parent == pid and state != "Z"]
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    return any(number == pid and state != "Z" for number, state, _ in _processes())


def _processes() -> Iterator[tuple[int, str, int]]:
    """Number, state and parent of all processes."""
    listing = subprocess.run(["ps", "-eo", "pid=,stat=,ppid="], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        pid, state, parent = line.split()
        yield int(pid), state[0], int(parent)


def under_torchrun(arguments: Sequence[str], ranks: int, log: Path) -> RunningJob:
    """Start a job under torchrun; what it prints goes to `log`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with log.open("wb") as file:
        return RunningJob(
            subprocess.Popen(
                [*command, "-m", "runtime.pretrain", *arguments],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )


def forked(arguments: Sequence[str], ranks: int, log: Path) -> RunningJob:
    """Start a job from a process that has imported all it needs; what it prints goes to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_launch, args=(list(arguments), ranks, str(log)))
    process.start()
    return RunningJob(process)


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

    _write_into(log)
    torch.set_num_threads(1)
    os._exit(fork_ranks(ranks, arguments, GRACE_S))
