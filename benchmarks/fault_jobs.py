"""Jobs of `runtime.pretrain` to be killed: under torchrun, or forked from a process that has imported it.

A restart under torchrun spends ten seconds and more with imports. A forked launcher does what torchrun does
with the ranks of one machine: it holds the store in which they meet, gives each a session of its own and ends
all when one fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]

PRELOADED = ["runtime.pretrain", "runtime.checkpoint", "torch.distributed.checkpoint"]

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
    """Fork the ranks, and end all when one fails; runs in the launcher."""
    _write_into(log)
    # It listens before the first rank looks for it, and nobody else gets the port in between.
    meeting = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = meeting.getsockname()[1]
    running = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            meeting.close()
            _rank(arguments, rank, ranks, port)
        running[pid] = rank
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach()
    )
    codes = []
    while running:
        pid, status = os.waitpid(-1, 0)
        running.pop(pid, None)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            _end(list(running))
            break
    del store
    os._exit(next((abs(code) for code in codes if code), 0))


def _end(pids: list[int]) -> None:
    """SIGTERM, and SIGKILL for those that do not heed it."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while pids and time.monotonic() < until:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rank(arguments: list[str], rank: int, ranks: int, port: int) -> NoReturn:
    """What one rank runs, as `python -m runtime.pretrain` under torchrun would."""
    code = 1
    try:
        os.setsid()
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "forked",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        import torch

        import planner.flags
        import runtime
        from runtime import pretrain

        torch.set_num_threads(1)
        runtime.PARENT = os.getppid()
        pretrain.IS_FIRST = rank == 0
        sys.argv = ["runtime.pretrain", *arguments]
        planner.flags.run(pretrain.app, "runtime.pretrain", quiet=rank != 0)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
