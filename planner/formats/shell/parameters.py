"""Expansion of `${NAME...}`: substrings, changes of case, removed prefixes and suffixes, replacements."""

from __future__ import annotations

import fnmatch
import re

from planner.formats.shell.text import Char, Chars, Unknown, has_unknown, plain

Value = Chars | list[Chars]
"""The value of a variable: a text, or the elements of an array."""

_PART = re.compile(r":\s*(-?[0-9]{1,9})\s*(?::\s*(-?[0-9]{1,9})\s*)?")
_SHORTEN = re.compile(r"(##?|%%?)(.*)", re.DOTALL)
_REPLACE = re.compile(r"(//|/#|/%|/)((?:\\.|[^/])+)(?:/(.*))?", re.DOTALL)
_CASES = {"^^": str.upper, ",,": str.lower}

LONGEST = 500
"""Most characters of a value that is matched with patterns."""


def changed(value: Value, how: str) -> Value | None:
    """A value changed by the modifier `how` after its name; None where unknown."""
    part = _PART.fullmatch(how)
    if part is not None:
        start, size = int(part[1]), None if part[2] is None else int(part[2])
        if start < 0:
            return None if value and isinstance(value[0], list) else value[start:][:size]
        if size is not None and size < 0:
            return value[start:size]
        return value[start:][:size]
    if value and isinstance(value[0], list):
        parts = [_changed_text(element, how) for element in value if isinstance(element, list)]
        return None if None in parts else [element for element in parts if element is not None]
    return _changed_text([char for char in value if isinstance(char, tuple)], how)


def _changed_text(chars: Chars, how: str) -> Chars | None:
    if has_unknown(chars) or len(chars) > LONGEST or "$" in how or "`" in how:
        return None
    if how in _CASES:
        return [(_CASES[how](char), line) for char, line in chars]
    if how in ("^", ","):
        return [(_CASES[how * 2](char), line) for char, line in chars[:1]] + chars[1:]
    shorten = _SHORTEN.fullmatch(how)
    if shorten is not None:
        return _shortened(chars, shorten[1], _pattern(shorten[2]))
    replace = _REPLACE.fullmatch(how)
    return None if replace is None else _replaced(chars, *replace.groups())


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(text.replace("\\", "")))


def _shortened(chars: Chars, operator: str, pattern: re.Pattern[str]) -> Chars:
    """A value without its shortest (`#`, `%`) or longest (`##`, `%%`) matching prefix or suffix."""
    text, size = plain(chars), len(chars)
    lengths = range(size + 1) if len(operator) == 1 else range(size, -1, -1)
    for length in lengths:
        begin, end = (0, length) if operator[0] == "#" else (size - length, size)
        if pattern.match(text[begin:end]):
            return chars[length:] if operator[0] == "#" else chars[: size - length]
    return chars


def _replaced(chars: Chars, operator: str, pattern: str, new: str | None) -> Chars | None:
    """Characters with one text replaced by another; None where the pattern is not plain text."""
    old = pattern.replace("\\", "")
    if re.search(r"[*?\[]", old):
        return None
    text, line = plain(chars), chars[0][1] if chars else 0
    inserted: list[Char] = [(char, line) for char in new or ""]
    found: Chars = []
    at = 0
    while at < len(text):
        here = text.startswith(old, at)
        if operator == "/#":
            here = here and at == 0
        if operator == "/%":
            here = here and at + len(old) == len(text)
        if here:
            found += inserted
            at += len(old)
            if operator == "/":
                break
        else:
            found.append(chars[at])
            at += 1
    return [*found, *chars[at:]] if not any(isinstance(char, Unknown) for char, _ in found) else None
