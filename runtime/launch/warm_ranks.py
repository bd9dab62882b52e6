"""The launcher's side of `runtime.launch.fork_server`, which forks CPU ranks.

With torchrun, every rank and torchrun itself import PyTorch. Here one process imports it for all ranks, while
the launcher still plans. Jobs on GPUs and on several nodes use torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from costmodels.catalogue.local_machine import available_cores
from runtime import entry
from runtime.processes.tether import tether

CAN_FORK = sys.platform == "linux"
"""True on systems where forking is safe; on others, system libraries start threads that do not survive a
fork."""


class WarmRanks:
    """At most one process that imports the modules of CPU ranks and waits for its job."""

    def __init__(self) -> None:
        self.waiting: subprocess.Popen[str] | None = None

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the waiting process, if there is one."""
        process, self.waiting = self.waiting, None
        if process is not None:
            process.kill()
            process.communicate()

    def prepare(self, ranks: int) -> None:
        """Begin to import PyTorch for this number of ranks."""
        if self.waiting is not None:
            return
        # The driver of a GPU starts threads; and so does OpenBLAS, which has nothing to multiply here.
        environment = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads_of(ranks))
        self.waiting = subprocess.Popen(
            tether(entry.command("runtime.launch.fork_server")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def start(
        self, ranks: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Run a `command` of `torchrun_command`; `environment` is added to that of this process."""
        self.prepare(ranks)
        process, self.waiting = self.waiting, None
        assert process is not None and process.stdin is not None
        # After it come how the module is named, and its name.
        arguments = list(command[command.index(f"--nproc-per-node={ranks}") + 3 :])
        job = {"ranks": ranks, "arguments": arguments, "environment": environment, "command": list(command)}
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
        return process


def threads_of(ranks: int) -> str:
    """Threads of each rank (OMP_NUM_THREADS), as ranks share the cores."""
    return str(max(1, available_cores() // ranks))
