"""Messages of one rank, in a folder of its own: `rank_N/info.log`, and `rank_N/error.log` for errors.

Rank 0 alone speaks to the terminal. A file that cannot be written costs its lines, not the run.
"""

from __future__ import annotations

import sys
import traceback
from datetime import datetime
from pathlib import Path
from types import TracebackType

from runtime.logs import console
from runtime.logs.line_file import LineFile

INFO, ERROR = "info.log", "error.log"


class RankLog:
    """The two files of one rank. What it says goes to both them and where it went before."""

    def __init__(self, log_dir: str | Path, rank: int) -> None:
        self.folder = Path(log_dir) / f"rank_{rank}"
        self.files: dict[str, LineFile] = {}

    def open(self) -> None:
        """Begin to take what this rank says, and the exceptions that end it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            console.say(
                f"warning: {self.folder} cannot be made ({error.strerror}); the run goes on", sys.stderr
            )
            return
        self.files = {name: LineFile(self.folder / name) for name in (INFO, ERROR)}
        console.listener = self.write
        sys.excepthook = self._ended

    def write(self, text: str, is_error: bool) -> None:
        """Add lines, each with its time."""
        for name in (INFO, ERROR) if is_error else (INFO,):
            if name in self.files:
                for line in text.rstrip("\n").splitlines():
                    self.files[name].write(f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} {line.strip()}")

    def _ended(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.write("".join(traceback.format_exception(kind, error, trace)), True)
        sys.__excepthook__(kind, error, trace)
