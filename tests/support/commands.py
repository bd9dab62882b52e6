"""Commands that tests run, and what these print."""

from __future__ import annotations

import re
from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""Runs `planner ARGUMENTS...`; returns exit code, standard output and standard error."""

DOING = re.compile(
    r"(planner|runtime): (planning|preparing the data|opening the data|loading PyTorch|reading the model"
    r"|generating|starting \d+ ranks)( \.\.\.)?\n"
)


def told(err: str) -> str:
    """Standard error without what a command says that it is doing."""
    return "".join(line for line in err.splitlines(keepends=True) if not DOING.fullmatch(line))
