"""Conditions of shell scripts: `[ ... ]`, `[[ ... ]]` and `test`, with outcomes that may be unknown."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

Truth = bool | None
"""The outcome of a condition; None where unknown."""


def both(one: Truth, other: Truth) -> Truth:
    """The outcome of `one && other`."""
    return False if False in (one, other) else None if None in (one, other) else True


def either(one: Truth, other: Truth) -> Truth:
    """The outcome of `one || other`."""
    return True if True in (one, other) else None if None in (one, other) else False


def holds(words: Sequence[str | None], doubled: bool) -> Truth:
    """The outcome of a test of `words`, without its brackets; None is an unknown word.

    Files are never examined. `doubled` is true for `[[`, where `&&`, `||` and brackets are words of the test.
    """
    if len(words) > MOST_WORDS:
        return None
    for operator, combined in (("||" if doubled else "-o", either), ("&&" if doubled else "-a", both)):
        parts = _split(words, operator)
        if len(parts) > 1:
            outcome: Truth = combined is both
            for part in parts:
                outcome = combined(outcome, holds(part, doubled))
            return outcome
    if words and words[0] == "!":
        inner = holds(words[1:], doubled)
        return None if inner is None else not inner
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        return holds(words[1:-1], doubled)
    return _single(words, doubled)


MOST_WORDS = 60


def _split(words: Sequence[str | None], operator: str) -> list[Sequence[str | None]]:
    """The parts between operators that are outside of brackets."""
    parts, start, depth = [], 0, 0
    for at, word in enumerate(words):
        depth += (word == "(") - (word == ")")
        if not depth and word == operator:
            parts.append(words[start:at])
            start = at + 1
    return [*parts, words[start:]]


def _single(words: Sequence[str | None], doubled: bool) -> Truth:
    if not words:
        return False
    if len(words) == 1:
        return None if words[0] is None else bool(words[0])
    if None in words:
        return None
    texts = [word for word in words if word is not None]
    if len(texts) == 2:
        if not doubled and texts[0] in _BETWEEN:
            return False  # The word before the operator is not set: an error.
        return bool(texts[1]) == (texts[0] == "-n") if texts[0] in ("-z", "-n") else None
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        same = fits(left, right) if doubled else left == right
        return None if same is None else same == (operator != "!=")
    if doubled and operator in ("<", ">"):
        return None
    if doubled:
        left, right = left or "0", right or "0"
    if operator not in _BETWEEN:
        return None
    if not (_NUMBER.fullmatch(left) and _NUMBER.fullmatch(right)):
        return None if doubled else False
    a, b = int(left), int(right)
    outcomes = {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}
    return outcomes.get(operator)


_BETWEEN = ("=", "==", "!=", "-eq", "-ne", "-lt", "-le", "-gt", "-ge")
COMPARISONS = frozenset((*_BETWEEN, "=~"))
"""Words between two compared words of a test."""

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_PLAIN = re.compile(r"[^\\$`(){}|]*")


def fits(text: str, pattern: str) -> Truth:
    """Return whether a text matches a pattern with `*`, `?` and `[...]`; None for other kinds of patterns."""
    if len(text) > 500 or pattern.count("*") > 10:
        return None
    if not _PLAIN.fullmatch(pattern):
        return text == pattern if not re.search(r"[*?\[\\]", pattern) else None
    return re.fullmatch(fnmatch.translate(pattern), text) is not None
