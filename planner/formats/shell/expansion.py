"""Expansion of the words of a shell script: variables, defaults, arrays, sums and quotes. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

from planner.formats.shell.arithmetic import whole_value
from planner.formats.shell.commands import ASSIGNMENT, simple_commands
from planner.formats.shell.parameters import changed
from planner.formats.shell.printing import formatted
from planner.formats.shell.text import (
    DEEPEST,
    LONGEST,
    Char,
    Chars,
    Part,
    Unknown,
    Word,
    has_unknown,
    plain,
    word_of,
)

Piece = tuple[str, int, bool]
"""A character, its line, and a mark for quoted characters.

An unquoted missing character separates the elements of an array.
"""

Value = Chars | list[Chars]
"""The value of a variable: a text, or the elements of an array."""


class _Separator(str):
    """Marker between the elements of an array that become one text."""

    __slots__ = ()


_PRINTS = re.compile(r"^\s*(?:echo|printf|expr)\b|[;\n]\s*(?:echo|printf|expr)\b")

_ARITHMETIC = re.compile(r"[0-9\s+*/%()\\-]+")
"""Operators of `expr` for arithmetic."""

MOST_PRINTED = 4
"""Deepest nesting of commands whose output is computed."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*])(?:\[([^][]{1,80})\])?(:?[-=+?])?")
_ELEMENTS = re.compile(r"\$(@|\{@\}|\{[A-Za-z_]\w*\[@\]\})")
_NEVER_SET = re.compile(r"[A-Za-z_]\w*|[1-9][0-9]*")

ALWAYS_SET = ("HOME", "HOSTNAME", "PATH", "PWD", "RANDOM", "SECONDS", "SHELL", "TMPDIR", "UID", "USER")
"""Variables that are always set in a shell."""

LONGEST_NAME = 200
"""Most characters of a parameter's name with its modifiers."""

MOST_CHARS = 1_000_000
"""Most characters of all values of a script together; beyond, values are unknown."""


class Expansion:
    """The variables of a script, and the expansion of words."""

    def __init__(self, variables: dict[str, Value], fixed: Collection[str] = ()) -> None:
        """Start with given variables; those of `fixed` keep their values."""
        self.variables = variables
        self._fixed = fixed
        self._left = MOST_CHARS

    def words(self, raw: Chars) -> list[Word]:
        """The words that one source word expands to."""
        return [word_of(chars) for chars in self.split(raw)]

    def split(self, raw: Chars) -> list[Chars]:
        """The words that one source word expands to, as characters."""
        found: list[Chars] = []
        word: Chars | None = None
        for char, line, quoted in self._pieces(Part(raw), 0):
            if (not char and not quoted) or (not quoted and char.isspace()):
                if word is not None:
                    found.append(word)
                word = None
                continue
            word = [] if word is None else word
            if char:
                word.append((char, line))
        return found if word is None else [*found, word]

    def value(self, raw: Chars) -> Chars:
        """The value of a variable set to `raw`: blanks do not split it; array elements are joined by
        blanks."""
        found: Chars = [
            (char or " ", line) for char, line, quoted in self._pieces(Part(raw), 0) if char or not quoted
        ]
        return found if len(found) <= LONGEST else [(Unknown("a text that is too long"), found[0][1])]

    def _pieces(self, part: Part, depth: int) -> Iterator[Piece]:
        raw, at = part.chars, part.start
        while at < part.stop:
            char, line = raw[at]
            end = part.after(at)
            if isinstance(char, Unknown) or depth > DEEPEST:
                found: Iterator[Piece] = iter([(char, line, False)])
            elif char == "\\" and end == at + 2:
                escaped = raw[at + 1]
                found = iter([] if escaped[0] == "\n" else [(escaped[0], escaped[1], True)])
            elif char == "'" and end > at + 1:
                found = iter([("", line, True), *((inner, of, True) for inner, of in raw[at + 1 : end - 1])])
            elif char == '"' and end > at + 1:
                found = self._quoted(part.of(at + 1, end - 1), line, depth)
            elif char == "`" and end > at + 1:
                note = end > at + 2 and raw[at + 1][0] == "#"  # A comment between the lines of a command.
                found = iter([] if note else [(Unknown(plain(raw[at:end])), line, False)])
            elif char == "$" and at + 1 < part.stop and raw[at + 1][0] in ("'", '"'):
                found = iter(())  # The quotes behind it are read as such.
            elif char == "$":
                end, found = self._variable(part, at, end, depth)
            else:
                found = iter([(char, line, False)])
            for piece in found:
                self._left -= 1
                if self._left < 0:
                    yield (Unknown("a text that is too long"), line, False)
                    return
                yield piece
            at = end

    def _quoted(self, part: Part, line: int, depth: int) -> Iterator[Piece]:
        """Expansion within double quotes: blanks stay, and backslashes escape only a few characters."""
        if _ELEMENTS.fullmatch(plain(part.first(LONGEST_NAME))):
            _, elements = self._variable(part, part.start, part.after(part.start), depth)
            first = next(elements, None)
            if first is None:
                return  # All elements of none are no word.
        yield ("", line, True)
        raw, at = part.chars, part.start
        while at < part.stop:
            char, of = raw[at]
            if char == "\\" and at + 1 < part.stop and raw[at + 1][0] in '$`"\\\n':
                if raw[at + 1][0] != "\n":
                    yield (*raw[at + 1], True)
                at += 2
            elif char == "$" or (char == "`" and part.after(at) > at + 1):
                end = part.after(at)
                if char == "`":
                    yield (Unknown(plain(raw[at:end])), of, True)
                    at = end
                    continue
                at, found = self._variable(part, at, end, depth)
                for inner, where, quoted in found:
                    between = self.separator() if isinstance(inner, _Separator) else inner
                    if between or not isinstance(inner, _Separator):
                        yield (between, where, bool(between) or quoted)
            else:
                yield (char, of, True)
                at += 1

    def _variable(self, part: Part, at: int, end: int, depth: int) -> tuple[int, Iterator[Piece]]:
        """The index after an expansion that begins with a dollar sign, and its value."""
        raw, line = part.chars, part.chars[at][1]
        opening, closing = plain(raw[at : min(at + 3, end)]), plain(raw[max(at, end - 2) : end])
        if end > at + 3 and opening == "$((" and closing == "))":
            return end, _as_pieces(self._sum(part.of(at + 3, max(at + 3, end - 2)), line))
        if plain(raw[at : at + 2]) == "$[" and (end := self._bracket(part, at)) > at:
            return end, _as_pieces(self._sum(part.of(at + 2, end - 1), line))
        if end > at + 2 and opening.startswith("$("):
            printed = self._printed(raw[at + 2 : end - 1], depth)
            unknown: Chars = [(Unknown(plain(raw[at:end])), line)]
            return end, _as_pieces(unknown if printed is None else printed)
        if end > at + 2 and opening.startswith("${"):
            return end, self._braced(part.of(at + 2, end - 1), line, depth + 1)
        name = _NAME.match(plain(part.of(at + 1, part.stop).first(LONGEST_NAME)))
        if name is None:
            return at + 1, iter([("$", line, False)])
        return at + 1 + name.end(), self._braced(part.of(at + 1, at + 1 + name.end()), line, depth + 1)

    def _printed(self, inner: Chars, depth: int) -> Chars | None:
        """The output of `$(...)` if its commands only set variables and print; None for others."""
        text = plain(inner)
        if depth > MOST_PRINTED or len(text) > LONGEST_NAME or not _PRINTS.search(text) or ">" in text:
            return None
        other = Expansion(dict(self.variables), self._fixed)
        other._left = self._left
        found: Chars = []
        for before, raw in simple_commands(inner, []):
            if before not in ("\n", ";"):
                return None
            matches = [ASSIGNMENT.fullmatch(plain(word[: _end_of_name(word)])) for word in raw]
            if all(match and not (match[2] or match[3]) for match in matches):
                for match, word in zip(matches, raw, strict=True):
                    if match is None or plain(word[match.end() : match.end() + 1]) == "(":
                        return None
                    other.variables[match[1]] = other.value(word[match.end() :])
                continue
            name, *words = [part for word in raw for part in other.split(word)]
            if plain(name) == "printf" and words:
                written = formatted(words[0], words[1:])
            elif plain(name) == "echo" and not any(
                plain(word[:1]) == "-" or "\\" in plain(word) for word in words
            ):
                line = name[0][1]
                written = [
                    char for at, word in enumerate(words) for char in (*[(" ", line)] * (at > 0), *word)
                ]
                written.append(("\n", line))
            elif plain(name) == "expr" and words and _ARITHMETIC.fullmatch(" ".join(map(plain, words))):
                result = self.number(" ".join(map(plain, words)).replace("\\*", "*"))
                written = None if result is None else [(char, name[0][1]) for char in str(result)]
            else:
                return None
            if written is None:
                return None
            found += written
        self._left = other._left
        while found and found[-1][0] == "\n":
            found.pop()
        return found

    def separator(self) -> str:
        """The text between the elements of an array that quotes join."""
        value = self.variables.get("IFS")
        if value is None or has_unknown(_first(value)):
            return " "
        return plain(_first(value))[:1]

    def _bracket(self, part: Part, at: int) -> int:
        """The index after `$[...]`, the old form of a sum; `at` where it is not closed."""
        ends = (
            end + 1 for end in range(at + 2, min(part.stop, at + LONGEST_NAME)) if part.chars[end][0] == "]"
        )
        return next(ends, at)

    def never_set(self, value: Value | None) -> bool:
        """Return whether a value is a single variable that the script uses but never sets.

        Such a variable is unset when the script runs unchanged.
        """
        if value is None or len(value) != 1 or not isinstance(value[0], tuple):
            return False
        name = value[0][0]
        return (
            isinstance(name, Unknown)
            and _NEVER_SET.fullmatch(name) is not None
            and name not in ALWAYS_SET
            and name not in self.variables
        )

    def is_argument(self, value: Value | None) -> bool:
        """Return whether a value is an argument of a script whose caller says none of its arguments."""
        if value is None or not self.never_set(value) or self.variables.get("@"):
            return False
        return str(value[0][0]).isdigit()

    def _braced(self, inner: Part, line: int, depth: int) -> Iterator[Piece]:
        if plain(inner.first(2)) == "#" and "@" in self.variables:
            return _as_pieces([(char, line) for char in str(len(_elements(self.variables["@"])))])
        match = _PARAMETER.match(plain(inner.first(LONGEST_NAME)))
        if match is None:
            return _unknown(inner, line)
        prefix, name, index, operator = match.groups()
        rest = inner.of(inner.start + match.end(), inner.stop)
        if name in ("@", "*"):
            name, index = "@", name
        value = self.variables.get(name)
        if prefix == "!":
            # The variable whose name is the value of another.
            pointed = None if value is None or index or operator else plain(_first(value))
            value = self.variables.get(pointed or "")
            if value is None:
                return _unknown(inner, line)
        if index is not None and index not in ("@", "*"):
            value = self._element(name, index)
        if prefix == "#":
            if value is None or operator or rest.start < rest.stop or has_unknown(_first(value)):
                return _unknown(inner, line)
            parts = len(_elements(value)) if index in ("@", "*") else len(_first(value))
            return _as_pieces([(char, line) for char in str(parts)])
        if operator is None and rest.start < rest.stop:
            how = plain([(char, of) for char, of, _ in self._pieces(rest, depth) if char])
            new = (
                None
                if value is None
                else changed(_elements(value) if index in ("@", "*") else _first(value), how)
            )
            return _unknown(inner, line) if new is None else _of_value(new, index)
        given = value is not None and bool(value or not (operator or "").startswith(":"))
        if operator in (":-", ":=", ":+") and self.never_set(value):
            given = False
        if operator is not None and operator[-1] in "-=":
            if given and value is not None:
                return _of_value(value, index)
            chars: Chars = [(char, of) for char, of, _ in self._pieces(rest, depth) if char]
            if operator[-1] == "=":
                self.variables[name] = chars
            return _as_pieces(chars)
        if operator is not None and operator[-1] == "+":
            return self._pieces(rest, depth) if given else iter(())
        if value is None:
            return iter(()) if name == "@" else iter([(Unknown(name), line, False)])
        return _of_value(value, index)

    def _element(self, name: str, index: str) -> Value | None:
        """The element of an array at `index`, a number or a name."""
        key = plain(self.value([(char, 0) for char in index]))
        named = self.variables.get(element_name(name, key))
        value = self.variables.get(name)
        if named is not None or value is None:
            return named
        at = self.number(key)
        if at is None:
            return None
        elements = _elements(value)
        return elements[at] if -len(elements) <= at < len(elements) else []

    def number(
        self, text: str, assign: Callable[[str, int | None], None] = lambda name, value: None
    ) -> int | None:
        """The value of an arithmetic expression; None where it is invalid or unknown."""

        def text_of(name: str) -> str | None:
            value = self.variables.get(name)
            return None if value is None or has_unknown(_first(value)) else plain(_first(value))

        return whole_value(text, text_of, assign)

    def _sum(self, inner: Part, line: int) -> Chars:
        """The value of `$((inner))`."""
        result = self.number(plain([(c, n) for c, n, _ in self._pieces(inner, DEEPEST // 2)]), self._set)
        text = plain(inner.all).strip()
        return [(Unknown(f"(({text}))"), line)] if result is None else [(char, line) for char in str(result)]

    def _set(self, name: str, value: int | None) -> None:
        if name in self._fixed:
            return
        self.variables[name] = [
            (Unknown(name), 0) if value is None else (char, 0) for char in str(value or 0)
        ]


def _end_of_name(word: Chars) -> int:
    """Index after the first equals sign of a word."""
    return next((at + 1 for at, (char, _) in enumerate(word[:LONGEST_NAME]) if char == "="), 0)


def element_name(array: str, key: str) -> str:
    """The name under which a named element of an array is stored."""
    return f"{array}[{key}]"


def _unknown(part: Part, line: int) -> Iterator[Piece]:
    return iter([(Unknown(plain(part.all)), line, False)])


def _is_array(value: Value) -> bool:
    return bool(value) and isinstance(value[0], list)


def _elements(value: Value) -> list[Chars]:
    return (
        [element for element in value if isinstance(element, list)]
        if _is_array(value) or not value
        else [_first(value)]
    )


def _first(value: Value) -> Chars:
    """The value of a variable without an index: its text, or its first element."""
    if value and isinstance(value[0], list):
        return value[0]
    return [char for char in value if isinstance(char, tuple)]


def _as_pieces(chars: Sequence[Char]) -> Iterator[Piece]:
    return ((char, line, False) for char, line in chars)


def _of_value(value: Value, index: str | None) -> Iterator[Piece]:
    if index not in ("@", "*") or not _is_array(value):
        yield from _as_pieces(_first(value))
        return
    for number, element in enumerate(_elements(value)):
        if number:
            yield (_Separator(" ") if index == "*" else "", element[0][1] if element else 0, False)
        # Between quotes blanks within an element stay; without them each of its words is one.
        yield from ((char, line, False) for char, line in element)
