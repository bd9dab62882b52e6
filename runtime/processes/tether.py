"""A command that ends when its parent process ends:

`python .../tether.py PID WORDS`. A killed launcher cannot end its job, so Linux does it; on other systems the
command continues.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Option of prctl(2) for the signal that a process gets when its parent ends; it persists over exec."""


def tether(command: list[str]) -> list[str]:
    """`command` with a wrapper that kills it when this process ends."""
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
