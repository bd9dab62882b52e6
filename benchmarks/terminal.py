"""A pseudo-terminal, in which commands print as in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
"""Pattern of control sequences, such as colours and cursor movements."""


@dataclass(frozen=True)
class Shown:
    """The output of a command on a terminal."""

    code: int
    raw: str

    @property
    def lines(self) -> list[str]:
        """The lines of the screen without colours, including overwritten ones."""
        return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", self.raw)) if line]

    @property
    def text(self) -> str:
        """The words of the screen, without line breaks."""
        return " ".join(" ".join(self.lines).split())


def in_terminal(*words: str, columns: int, folder: Path, **environment: str) -> Shown:
    """Run `planner WORDS...` in `folder`, in a terminal of `columns` and 24 lines."""
    child, end = pty.fork()
    if child == 0:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(0, termios.TIOCSWINSZ, size)
        os.chdir(folder)
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        os.environ.update(TERM="xterm-256color", PYTHONPATH=str(ROOT), **environment)
        os.execv(sys.executable, [sys.executable, "-m", "planner", *words])
    written = b""
    while True:
        try:
            some = os.read(end, 65536)
        except OSError:  # The other end is closed.
            break
        if not some:
            break
        written += some
    os.close(end)
    _, status = os.waitpid(child, 0)
    return Shown(os.waitstatus_to_exitcode(status), written.decode())
