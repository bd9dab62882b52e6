"""The output of `printf` for its format and arguments, character by character. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.formats.shell.text import LONGEST, Char, Chars, has_unknown, plain

_PIECE = re.compile(r"%([-0 +]*)([0-9]{0,3})(?:\.([0-9]{1,3}))?([sdiu%])|\\(.)|([^%\\]+)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}


def formatted(form: Chars, arguments: Sequence[Chars]) -> Chars | None:
    """The text that `printf` prints; None where unknown.

    The format is repeated while arguments are left; missing arguments are empty, or 0.
    """
    text, line = plain(form), form[0][1] if form else 0
    if has_unknown(form):
        return None
    pieces = [match.groups() for match in _PIECE.finditer(text)]
    if "".join(match.group() for match in _PIECE.finditer(text)) != text:
        return None
    takes = sum(kind in ("s", "d", "i", "u") for _, _, _, kind, _, _ in pieces if kind)
    found: Chars = []
    left = list(arguments)
    while True:
        for flags, width, most, kind, escape, literal in pieces:
            if literal is not None or kind == "%":
                found += _chars(literal or "%", line)
            elif escape is not None:
                if escape not in _ESCAPES:
                    return None
                found += _chars(_ESCAPES[escape], line)
            else:
                value = left.pop(0) if left else []
                written = _written(value, flags, width, most, kind, line)
                if written is None:
                    return None
                found += written
        if not left or not takes or len(found) > LONGEST:
            return found


def _written(value: Chars, flags: str, width: str, most: str | None, kind: str, line: int) -> Chars | None:
    if kind == "s" and not (width or most):
        return value
    if has_unknown(value):
        return None
    text = plain(value)
    precision = "" if most is None else f".{most}"
    if kind == "s":
        return _chars(f"%{flags}{width}{precision}s" % text, line)
    if not re.fullmatch(r"[+-]?[0-9]{0,18}", text):
        return None
    return _chars(f"%{flags}{width}{precision}d" % int(text or "0"), line)


def _chars(text: str, line: int) -> list[Char]:
    return [(char, line) for char in text]
