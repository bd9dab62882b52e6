"""The torchrun command of a job on this machine, for a process and for people."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime import entry

AGENT = "runtime.launch.agent"
"""The module with torchrun's agent."""


def torchrun_command(ranks: int, arguments: Sequence[str], module: str = "runtime.pretrain") -> list[str]:
    """The command that starts `ranks` ranks of `module` on this machine."""
    return [
        *entry.command(AGENT, "--standalone", f"--nproc-per-node={ranks}"),
        *(entry.ENTRY, module, *arguments),
    ]


def shell_line(command: Sequence[str]) -> str:
    """A command of `torchrun_command` as typed in a shell: with `-m`, and with the script `torchrun` if it is
    beside this Python.
    """
    words = list(command)
    torchrun = entry.command(AGENT)
    if words[: len(torchrun)] != torchrun:
        return shlex.join(words)
    script = Path(sys.executable).with_name("torchrun")
    typed = [str(script)] if script.is_file() else [sys.executable, "-m", "torch.distributed.run"]
    rest = words[len(torchrun) :]
    rest[rest.index(entry.ENTRY)] = "-m"
    return shlex.join([*typed, *rest])
