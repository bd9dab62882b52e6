"""Run a command that ends when the process that started it ends: `python .../tether.py PID WORDS`.

A launcher that is killed cannot end its job. Linux does it for it; elsewhere the command runs on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent ends; a program it executes keeps it."""


def tether(command: list[str]) -> list[str]:
    """`command`, so that it is killed when this process ends."""
    # By its path and isolated: what lies in the working directory is not to be imported.
    return [sys.executable, "-I", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main() -> None:
    """Tie this process to its parent and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)  # The parent has ended before it was watched.
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
