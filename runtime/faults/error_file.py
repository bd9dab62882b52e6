"""The file with which the ranks of a job report the reason of its end to `planner launch`. Never imports
torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from costmodels.files import MIB, read_text
from runtime.logs.console import say

ERROR_FILE_VARIABLE = "PLANNER_ERROR_FILE"
"""Environment variable with the path of the error file."""


class Report(NamedTuple):
    """The reason of a job's end, and its exit code."""

    message: str
    exit_code: int
    restart: bool
    """True if a restart of the job may succeed."""


def report(message: str, exit_code: int, restart: bool = False) -> None:
    """Report the reason of the job's end to the launcher, if there is one."""
    target = os.environ.get(ERROR_FILE_VARIABLE)
    if not target:
        return
    whole = Path(target)
    part = whole.with_name(f"{whole.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(Report(message, exit_code, restart)._asdict()))
        part.replace(whole)
    except OSError as error:
        say(f"runtime.pretrain: cannot write {target}: {error.strerror}", sys.stderr)


def read_report(path: Path) -> Report | None:
    """The reported reason of a job's end; None without a report."""
    try:
        values = json.loads(read_text(path, MIB))
        return Report(str(values["message"]), int(values["exit_code"]), bool(values.get("restart", False)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
