"""What words of a shell script stand for: variables, defaults, arrays, sums and quotes. Nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from planner.formats.text import DEEPEST, LONGEST, Char, Chars, Part, Unknown, Word, plain, word_of

Piece = tuple[str, int, bool]
"""A character, its line, and whether quotes keep it in its word.

No character without quotes ends a word: it stands between the elements of an array.
"""

Value = Chars | list[Chars]
"""Of a variable: a text, or the elements of an array."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*])(?:\[(@|\*|[0-9]+)\])?(:?[-=+?])?")
_NUMBERS = re.compile(r"[\w\s+\-*/%()$]*")

LONGEST_NAME = 200
"""Characters of a parameter's name and of what says how it is used, at most."""

LARGEST = 2**62

MOST_CHARS = 1_000_000
"""Characters that the values of one script may take together, beyond which none is known."""


class Expansion:
    """Variables, and words with their values in place."""

    def __init__(self, variables: dict[str, Value]) -> None:
        self.variables = variables
        self._left = MOST_CHARS

    def words(self, raw: Chars) -> list[Word]:
        """The words that one word of the source becomes."""
        return [word_of(chars) for chars in self.split(raw)]

    def split(self, raw: Chars) -> list[Chars]:
        """The same, character by character."""
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
        """What a variable gets that is set to `raw`: blanks do not split, and stand between elements."""
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
                found = iter([(Unknown(plain(raw[at:end])), line, False)])
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
        """Between double quotes: blanks stay, and backslashes stand before a few characters alone."""
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
                    yield (inner, where, bool(inner) or quoted)
            else:
                yield (char, of, True)
                at += 1

    def _variable(self, part: Part, at: int, end: int, depth: int) -> tuple[int, Iterator[Piece]]:
        """The index after what begins with a dollar, and what that stands for."""
        raw, line = part.chars, part.chars[at][1]
        opening, closing = plain(raw[at : min(at + 3, end)]), plain(raw[max(at, end - 2) : end])
        if end > at + 3 and opening == "$((" and closing == "))":
            return end, _as_pieces(self._sum(part.of(at + 3, max(at + 3, end - 2)), line))
        if end > at + 2 and opening.startswith("$("):
            return end, iter([(Unknown(plain(raw[at:end])), line, False)])
        if end > at + 2 and opening.startswith("${"):
            return end, self._braced(part.of(at + 2, end - 1), line, depth + 1)
        name = _NAME.match(plain(part.of(at + 1, part.stop).first(LONGEST_NAME)))
        if name is None:
            return at + 1, iter([("$", line, False)])
        return at + 1 + name.end(), self._braced(part.of(at + 1, at + 1 + name.end()), line, depth + 1)

    def _braced(self, inner: Part, line: int, depth: int) -> Iterator[Piece]:
        match = _PARAMETER.match(plain(inner.first(LONGEST_NAME)))
        if match is None:
            return _unknown(inner, line)
        counts, name, index, operator = match.groups()
        rest = inner.of(inner.start + match.end(), inner.stop)
        value = self.variables.get(name)
        if operator is None and rest.start < rest.stop:
            return _unknown(inner, line)
        if counts:
            if value is None or operator:
                return _unknown(inner, line)
            parts = len(value) if index or not _is_array(value) else len(_first(value))
            return _as_pieces([(char, line) for char in str(parts)])
        if index is not None and value is not None and index.isdigit():
            elements = _elements(value)
            value = elements[int(index)] if int(index) < len(elements) else []
        given = value is not None and bool(value or not (operator or "").startswith(":"))
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
            return iter(()) if name in "@*" else iter([(Unknown(name), line, False)])
        return _of_value(value, index)

    def _sum(self, inner: Part, line: int) -> Chars:
        """The value of `$((inner))`."""
        result = whole_value(plain([(c, n) for c, n, _ in self._pieces(inner, DEEPEST // 2)]), self.variables)
        text = plain(inner.all).strip()
        return [(Unknown(f"(({text}))"), line)] if result is None else [(char, line) for char in str(result)]


def _unknown(part: Part, line: int) -> Iterator[Piece]:
    return iter([(Unknown(plain(part.all)), line, False)])


def _is_array(value: Value) -> bool:
    return bool(value) and isinstance(value[0], list)


def _elements(value: Value) -> list[Chars]:
    return (
        [element for element in value if isinstance(element, list)] if _is_array(value) else [_first(value)]
    )


def _first(value: Value) -> Chars:
    """What a variable's bare name means: its text, or the first element."""
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
            yield (" " if index == "*" else "", element[0][1] if element else 0, False)
        # Between quotes blanks within an element stay; without them each of its words is one.
        yield from ((char, line, False) for char, line in element)


def whole_value(text: str, variables: dict[str, Value], depth: int = 0) -> int | None:
    """The value of an arithmetic expression of whole numbers; None where it is none or not known."""
    if len(text) > 1000 or depth > DEEPEST or not _NUMBERS.fullmatch(text) or "$" in text:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    try:
        return _evaluated(tree, variables, depth)
    except (ArithmeticError, RecursionError):
        return None


def _evaluated(node: ast.expr, variables: dict[str, Value], depth: int) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int and node.value < LARGEST else None
    if isinstance(node, ast.Name):
        value = variables.get(node.id)
        return None if value is None else whole_value(plain(_first(value)), variables, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = _evaluated(node.operand, variables, depth)
        return None if inner is None else (-inner if isinstance(node.op, ast.USub) else inner)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _evaluated(node.left, variables, depth), _evaluated(node.right, variables, depth)
    if left is None or right is None:
        return None
    result: int | None = None
    if isinstance(node.op, ast.Add):
        result = left + right
    elif isinstance(node.op, ast.Sub):
        result = left - right
    elif isinstance(node.op, ast.Mult):
        result = left * right
    elif isinstance(node.op, (ast.Div, ast.Mod)) and right:
        # A shell rounds towards zero.
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        result = quotient if isinstance(node.op, ast.Div) else left - quotient * right
    return result if result is not None and abs(result) < LARGEST else None
