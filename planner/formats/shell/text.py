"""Text with the line of each character, and the words of shell scripts in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

from costmodels.dataclass import dataclass


class Unknown(str):
    """Marker in a text for a part that is unknown without running the script; it has the part's name."""

    __slots__ = ()


Char = tuple[str, int]
"""A character, or an `Unknown`, and its line."""

Chars = list[Char]

DEEPEST = 40
"""Deepest nesting of constructs; deeper ones are taken literally."""

LONGEST = 50_000
"""Most characters of a value; more than fit on a command line."""


@dataclass(frozen=True)
class Word:
    """One word of a command, with variables and quotes resolved."""

    text: str
    line: int
    unknown: tuple[str, ...] = ()
    """Names of unknown variables and commands in the word."""

    @property
    def is_variable(self) -> bool:
        """True if the word is one variable or command, of which nothing is known."""
        return len(self.unknown) == 1 and self.text == f"${{{self.unknown[0]}}}"


def chars_of(source: str, line: int = 1) -> Chars:
    """The characters of a text that begins on `line`, without carriage returns."""
    found: Chars = []
    for char in source:
        if char == "\r":
            continue
        found.append((char, line))
        line += char == "\n"
    return found


def plain(chars: Sequence[Char]) -> str:
    """The plain text; unknown parts are written as variables."""
    return "".join(f"${{{char}}}" if isinstance(char, Unknown) else char for char, _ in chars)


def word_of(chars: Sequence[Char]) -> Word:
    """One word of all `chars`."""
    names = dict.fromkeys(str(char) for char, _ in chars if isinstance(char, Unknown))
    return Word(plain(chars), chars[0][1] if chars else 0, tuple(names))


def has_unknown(chars: Sequence[Char]) -> bool:
    """Return whether a part of a text is unknown."""
    return any(isinstance(char, Unknown) for char, _ in chars)


class Closings:
    """Ends of the constructs of a text: quotes, `${...}`, `$(...)`, `$((...))` and backquotes."""

    def __init__(self, chars: Chars) -> None:
        self._chars = chars
        self._found: dict[int, int] = {}

    def after(self, start: int, depth: int = 0) -> int:
        """Index after the construct that opens at `start`; the next index if no construct opens or closes."""
        if start not in self._found:
            self._found[start] = start + 1
            self._found[start] = self._after(start, depth)
        return self._found[start]

    def opens(self, at: int) -> bool:
        """Return whether a construct that may contain blanks opens at `at`."""
        char = self._char(at)
        return (char in "'\"`\\" and char != "") or (char == "$" and self._char(at + 1) in ("{", "("))

    def _char(self, at: int) -> str:
        if at >= len(self._chars) or isinstance(self._chars[at][0], Unknown):
            return ""
        return self._chars[at][0]

    def _after(self, start: int, depth: int) -> int:
        char, size = self._char(start), len(self._chars)
        if char == "\\":
            return min(start + 2, size)
        if depth > DEEPEST:
            return start + 1
        if char in ("'", "`"):
            ends = (at + 1 for at in range(start + 1, size) if self._char(at) == char)
            return next(ends, start + 1)
        if char == '"':
            return self._balanced(start, start + 1, '"', "", depth)
        if char == "$" and self._char(start + 1) == "{":
            return self._balanced(start, start + 2, "}", "", depth)
        if char == "$" and self._char(start + 1) == "(":
            return self._balanced(start, start + 2, ")", "(", depth)
        return start + 1

    def _balanced(self, start: int, at: int, close: str, nested: str, depth: int) -> int:
        opened = 1
        while at < len(self._chars):
            char = self._char(at)
            if char == close:
                opened -= 1
                if not opened:
                    return at + 1
            opened += bool(nested) and char == nested
            inside = close == '"' and char == "'"
            at = self.after(at, depth + 1) if self.opens(at) and not inside else at + 1
        return start + 1


class Part:
    """A part of a text; constructs are found once for the whole text."""

    def __init__(self, chars: Chars) -> None:
        self.chars, self.closings = chars, Closings(chars)
        self.start, self.stop = 0, len(chars)

    def of(self, start: int, stop: int) -> Part:
        """A part of the text; indices are those of the whole text."""
        other = copy(self)
        other.start, other.stop = start, stop
        return other

    def after(self, at: int) -> int:
        """Index after the construct that opens at `at`; the next index if no construct opens or closes."""
        end = self.closings.after(at) if self.closings.opens(at) else at + 1
        return end if end <= self.stop else at + 1

    def first(self, count: int) -> Chars:
        """The text's first characters."""
        return self.chars[self.start : min(self.start + count, self.stop)]

    @property
    def all(self) -> Chars:
        """All characters of the text."""
        return self.chars[self.start : self.stop]


def split_words(chars: Sequence[Char]) -> Iterator[list[Char]]:
    """The parts of a text between blanks."""
    word: list[Char] = []
    for char in chars:
        if char[0].isspace():
            if word:
                yield word
            word = []
        else:
            word.append(char)
    if word:
        yield word
