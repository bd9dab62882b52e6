"""Messages of one rank, in its own folder: `rank_N/info.log`, and `rank_N/error.log` for errors.

Only rank 0 prints to the terminal. If a file cannot be written, its lines are lost, but the run continues.
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
    """The two files of one rank. Its messages go to these files and to their usual destination."""

    def __init__(self, log_dir: str | Path, rank: int) -> None:
        self.folder = Path(log_dir) / f"rank_{rank}"
        self.files: dict[str, LineFile] = {}

    def open(self) -> None:
        """Begin to record this rank's messages, and the exceptions that end it."""
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
