"""What flags and keys do to the answer, said of those where somebody should know."""

from __future__ import annotations

from collections.abc import Iterable

from planner.formats.flag_catalogue import GivenFlag
from planner.formats.reading import Problems

NOT_SUPPORTED = "not supported: it makes another model or job of it than the one that is priced"
NOT_PRICED = "not priced: it changes memory or time, and the estimates are without it"


def name_others(given: Iterable[GivenFlag], problems: Problems, unknown: str) -> None:
    """A note for each flag or key that says nothing to the planner.

    Args:
        unknown: what is said of those that nobody knows.
    """
    named = {problem.flag for problem in problems.found}
    for flag in given:
        if flag.name in named:
            continue  # Something more is said of it.
        if flag.known.role == "unsupported":
            problems.add("note", NOT_SUPPORTED, flag.name, flag.line)
        elif flag.known.role == "unpriced":
            problems.add("note", NOT_PRICED, flag.name, flag.line)
        elif flag.known.role == "unknown":
            problems.add("note", unknown, flag.name, flag.line, flag.known.about)
