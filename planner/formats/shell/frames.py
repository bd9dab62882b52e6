"""Open constructs of a script during reading."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from planner.formats.shell.conditions import Truth
from planner.formats.shell.expansion import Value


@dataclass
class Frame:
    """An open construct: an `if`, a loop, or a function call."""

    kind: str
    runs: Truth
    """True if the body of the construct runs; None where unknown."""
    done: Truth = False
    """True if an earlier branch of an `if` has run."""
    tests: bool = False
    """True while the condition of an `if` or a `while` is read."""
    subject: str | None = None
    """The subject of a `case`."""
    patterns: list[str] | None = None
    """The patterns of the next branch of a `case`, while they are read."""
    outside: dict[str, Value] | None = None
    """The variables before a subshell."""
