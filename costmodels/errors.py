"""Errors that a user can correct: one line with the fault, its place and the correction."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError


class InputError(ValueError):
    """Wrong input; the message names the argument, its value and the valid values. Exit code 2."""

    exit_code = 2


class NoLayoutFits(InputError):
    """Every legal layout needs more memory than the devices have. Exit code 3."""

    exit_code = 3

    def __init__(
        self, line: str, closest: Any = None, proposals: Sequence[Any] = (), nearest: Sequence[Any] = ()
    ) -> None:
        super().__init__(line)
        self.nearest = tuple(nearest)
        """The plans (`planner.Plan`) that lack least memory, the nearest first."""
        self.closest = closest
        """The `planner.Plan` that lacks least memory."""
        self.proposals = tuple(proposals)
        """The changes that would fit (`planner.proposals.Proposal`), the smallest of each kind."""


MOST_PARTS = 3
"""Most wrong fields that one line names; in a file of another kind all are wrong."""

LONGEST_LINE = 1500
"""Most characters of a message; the content of a broken file may be far longer."""


def on_one_line(error: Exception) -> str:
    """The message of an error on a single line; a validation error names the fields and their values."""
    if not isinstance(error, ValidationError):
        return _shown(" ".join(str(error).split()))
    parts = []
    for item in error.errors()[:MOST_PARTS]:
        where = ".".join(str(part) for part in item["loc"])
        given = "" if isinstance(item["input"], dict) else f" {reprlib.repr(item['input'])}"
        message = " ".join(item["msg"].replace("Value error, ", "").split())
        parts.append(f"{where}{given}: {message}" if where else message)
    more = error.error_count() - len(parts)
    return _shown("; ".join(parts) + (f"; and {more} more" if more else ""))


def _shown(line: str) -> str:
    """A line for a terminal, without control characters.

    A line that is too long keeps its beginning and its end, as the end names the correction.
    """
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(plain) <= LONGEST_LINE:
        return plain
    return f"{plain[: 2 * LONGEST_LINE // 3]} ... {plain[-LONGEST_LINE // 3 :]}"
