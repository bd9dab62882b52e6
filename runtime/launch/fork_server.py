"""Ranks on a CPU, forked from one process that has imported their modules.

`warm_ranks` starts this process, possibly before the job is known; the job comes as one line of JSON. For the
ranks this process replaces torchrun's agent: it is their parent, has the store of the rendezvous, and ends
all ranks when one fails. Where forking is not safe it becomes torchrun.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from runtime.launch.agent import END, LEFT_TO_RANKS, leave_to_ranks
from runtime.logs.console import flush, say

PRELOADED_MODULES = ("runtime.pretrain", "runtime.job.loop", "torch._dynamo", "numpy.random")
"""Modules that every rank needs, or that PyTorch imports in its first step."""

GRACE_S = 30.0
"""Seconds that ranks have to end after SIGTERM, as with torchrun."""

LOOK_PERIOD_S = 0.5
"""Seconds between checks if the time of ending ranks is over."""

SIGNALS = (*LEFT_TO_RANKS, END, signal.SIGUSR1)
"""Signals that this process or its ranks handle."""

HOST = "127.0.0.1"


class ForkRequest(BaseModel):
    """The ranks to fork, and their command."""

    ranks: int
    arguments: list[str]
    """Arguments of `runtime.pretrain`."""
    environment: dict[str, str]
    command: list[str]
    """The torchrun that does the same."""


def main() -> NoReturn:
    """Import, wait for the job on standard input, and run it."""
    gc.disable()  # To look through all that is imported for garbage takes a fifth of the time.
    for name in PRELOADED_MODULES:
        import_module(name)
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        sys.exit(0)  # Whoever started this has ended, or wants no ranks after all.
    # Not pydantic's reader of JSON: words that are no UTF-8 have surrogates, which it refuses.
    job = ForkRequest.model_validate(json.loads(line))
    os.environ |= job.environment
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    for name in _also_needed(job.arguments):
        import_module(name)
    if not _has_one_thread():
        os.execv(job.command[0], job.command)
    # Imported objects stay: collectors that look at them would copy their memory for every rank.
    gc.collect()
    gc.freeze()
    gc.enable()
    code = run(job.ranks, job.arguments)
    flush()
    # Extensions below PyTorch complain of memory that is never freed, and to free all takes a while.
    os._exit(code)


def _also_needed(arguments: Sequence[str]) -> Iterator[str]:
    """Further modules that each rank with these arguments would import separately."""
    if {"--save", "--load"} & set(arguments):
        yield "runtime.checkpoint"
        yield "runtime.job.initial_state"
    if "--plan" in arguments:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            plan = json.loads(Path(arguments[arguments.index("--plan") + 1]).read_text())
            if plan["layout"]["pipeline_parallel"] > 1:
                yield "runtime.parallel.pipeline"


def _has_one_thread() -> bool:
    """Return whether this process has one thread, as another thread's lock would never open in a forked
    process."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def run(ranks: int, arguments: Sequence[str], grace_s: float = GRACE_S) -> int:
    """Fork the ranks and wait for their end; returns the exit code of the job, 0 for a stopped one.

    Args:
        arguments: arguments of `runtime.pretrain`.
        grace_s: seconds that ranks have to end after SIGTERM.
    """
    listener = socket.create_server((HOST, 0), backlog=ranks + 1)
    port = listener.getsockname()[1]
    # A signal that comes meanwhile waits until there is somebody to hear of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    running: dict[int, int] = {}
    agent = os.getpid()
    flush()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            listener.close()
            _become(agent, rank, ranks, port, arguments)
        running[pid] = rank
    return _Agent(running, grace_s).watch(listener)


class _Agent:
    """The agent that watches the forked ranks."""

    def __init__(self, running: Mapping[int, int], grace_s: float) -> None:
        self.running, self.grace_s = dict(running), grace_s
        self.first = min(running)
        self.stopped = False
        self.kills_at: float | None = None

    def watch(self, listener: socket.socket) -> int:
        """Wait for all ranks; the exit code of the job."""
        from torch._C._distributed_c10d import TCPStore

        # Taken in `_next`; blocked before the store starts a thread, which would take them instead.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        leave_to_ranks()
        signal.signal(END, self._stop)
        signal.signal(signal.SIGUSR1, self._pass_on)
        port, file = listener.getsockname()[1], listener.detach()
        store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        failed = 0
        while self.running:
            rank, pid, code = self._next()
            if code and not failed and not self.stopped:
                failed = code
                say(
                    f"runtime.launch.fork_server: failed (exitcode: {code}) local_rank: {rank} (pid: {pid})",
                    sys.stderr,
                )
                self._end()
            elif code and not failed:
                failed = code
        del store
        return failed if failed >= 0 else 1

    def _next(self) -> tuple[int, int, int]:
        """Rank, process and exit code of the next rank that ends."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self.running:
                return self.running.pop(pid), pid, os.waitstatus_to_exitcode(status)
            if self.kills_at is not None and time.monotonic() > self.kills_at:
                self._send(signal.SIGKILL)
            # Not a waitpid that waits: a request to stop would be heard, and the wait go on without an end.
            signal.sigtimedwait({signal.SIGCHLD}, LOOK_PERIOD_S)

    def _send(self, number: int) -> None:
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self) -> None:
        if self.kills_at is None:
            self.kills_at = time.monotonic() + self.grace_s
            self._send(signal.SIGTERM)

    def _stop(self, *_: object) -> None:
        self.stopped = True
        self._end()

    def _pass_on(self, *_: object) -> None:
        """Pass a request to save to one rank, which is enough for all."""
        if self.first in self.running:
            os.kill(self.first, signal.SIGUSR1)


def _become(agent: int, rank: int, ranks: int, port: int, arguments: Sequence[str]) -> NoReturn:
    """Run a rank in a forked process, like `python -m runtime.pretrain` under torchrun."""
    code: Any = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ |= _environment(rank, ranks, port)
        import torch

        import runtime
        from runtime import pretrain

        # A fork breaks PyTorch's pool of threads, which the next use mends; two threads that come to it at
        # once, as training and its backward, would end the process ("Invalid thread pool").
        torch.set_num_threads(torch.get_num_threads())
        runtime.PARENT = agent
        sys.argv = ["runtime.pretrain", *arguments]
        pretrain.main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing of the forking process may be ended with a rank of it.
        flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables that torchrun sets for a rank."""
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks))
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    restarts = dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0")
    return {**own, **of_all, **meeting, **restarts, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "forked"}


if __name__ == "__main__":
    main()
