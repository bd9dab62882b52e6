"""Integer arithmetic of the shell, as in `$((...))`, `((...))` and `let`. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable

LARGEST = 2**62
LONGEST = 1000
"""Most characters of an expression."""
DEEPEST = 20
"""Deepest nesting of brackets, signs and variables."""
MOST_VARIABLES = 200
"""Most variables in one expression whose values are expressions themselves."""

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|[0-9]+)|([A-Za-z_]\w*)"
    r"|(\*\*|<<=|>>=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^<>=!~?:(),]))"
)
_LEVELS = ("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %")
_LEVEL = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators.split()}
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")

Number = int | None
"""A number; None for an unknown value."""


def whole_value(
    text: str,
    value_of: Callable[[str], str | None],
    assign: Callable[[str, Number], None] = lambda name, value: None,
    left: list[int] | None = None,
    depth: int = 0,
) -> Number:
    """The value of an expression; None where the text is not an expression, or its value is unknown.

    Args:
        value_of: gives the text of a variable, itself an expression; None where unknown.
        assign: gives a variable a value.
        left: number of further variables that may be expressions.
    """
    left = [MOST_VARIABLES] if left is None else left
    left[0] -= 1
    if len(text) > LONGEST or depth > DEEPEST or left[0] < 0:
        return None
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match.group().strip())
        at = match.end()
    reader = _Expression(tokens, value_of, assign, left, depth)
    try:
        value = reader.listed()
    except _NotKnown:
        return None
    return value if reader.at == len(tokens) else None


class _NotKnown(Exception):
    """Error: the text is not an expression, or its value is unknown."""


class _Expression:
    def __init__(
        self,
        tokens: list[str],
        value_of: Callable[[str], str | None],
        assign: Callable[[str, Number], None],
        left: list[int],
        depth: int,
    ) -> None:
        self.tokens = tokens
        self.at = 0
        self._value_of = value_of
        self._assign = assign
        self._left = left
        self._depth = depth
        self._skips = 0  # Parts of it that are read and not computed.

    def listed(self) -> Number:
        """The value of a comma-separated list of expressions, which is that of the last one."""
        value = self._assigned()
        while self._take(","):
            value = self._assigned()
        return value

    def _next(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def _take(self, token: str) -> bool:
        if self._next() != token:
            return False
        self.at += 1
        return True

    def _assigned(self) -> Number:
        name = self._next()
        if name[:1].isalpha() or name[:1] == "_":
            operator = self._next(1)
            if operator in _ASSIGNMENTS:
                self.at += 2
                value = self._inside(self._assigned)
                return self._set(name, value if operator == "=" else self._binary(operator[:-1], name, value))
        return self._chosen()

    def _binary(self, operator: str, name: str, value: Number) -> Number:
        return _computed(operator, self._named(name), value)

    def _set(self, name: str, value: Number) -> Number:
        if not self._skips:
            self._assign(name, value)
        return value

    def _chosen(self) -> Number:
        condition = self._level(0)
        if not self._take("?"):
            return condition
        first = self._unless(condition == 0, lambda: self._inside(self._assigned))
        if not self._take(":"):
            raise _NotKnown
        second = self._unless(condition not in (None, 0), lambda: self._inside(self._chosen))
        return None if condition is None else first if condition else second

    def _unless(self, skips: bool, part: Callable[[], Number]) -> Number:
        self._skips += skips
        value = part()
        self._skips -= skips
        return value

    def _level(self, level: int) -> Number:
        """The value of an expression with operators of precedence `level` or higher, evaluated from left to
        right."""
        left = self._power() if level == len(_LEVELS) else self._level(level + 1)
        while level < len(_LEVELS) and _LEVEL.get(self._next()) == level:
            operator = self._next()
            self.at += 1
            decided = (operator == "&&" and left == 0) or (operator == "||" and left not in (None, 0))
            right = self._unless(decided, lambda: self._level(level + 1))
            left = _computed(operator, left, right)
        return left

    def _power(self) -> Number:
        base = self._unary()
        if self._take("**"):
            return _computed("**", base, self._inside(self._power))
        return base

    def _unary(self) -> Number:
        token = self._next()
        self.at += 1
        if token in ("+", "-", "!", "~"):
            value = self._inside(self._unary)
            if value is None:
                return None
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            name = self._next()
            self.at += 1
            return self._set(name, _computed(token[0], self._named(name), 1))
        if token == "(":
            value = self._inside(self.listed)
            if not self._take(")"):
                raise _NotKnown
            return value
        if token[:1].isdigit():
            return _number(token)
        if not token or not (token[0].isalpha() or token[0] == "_"):
            raise _NotKnown
        value = self._named(token)
        if self._next() in ("++", "--"):
            self._set(token, _computed(self._next()[0], value, 1))
            self.at += 1
        return value

    def _inside(self, part: Callable[[], Number]) -> Number:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _NotKnown
        value = part()
        self._depth -= 1
        return value

    def _named(self, name: str) -> Number:
        text = self._value_of(name)
        if text is None:
            return None
        if not text.strip():
            return 0
        if text.isdigit():
            return _number(text)
        return whole_value(text, self._value_of, left=self._left, depth=self._depth + 1)


def _number(token: str) -> Number:
    """The number in a token; a leading 0 means octal."""
    if len(token) > 20:
        return None
    try:
        if token[:2].lower() == "0x":
            value = int(token, 16)
        else:
            value = int(token, 8) if token[0] == "0" else int(token)
    except ValueError:
        return None
    return value if value < LARGEST else None


def _computed(operator: str, left: Number, right: Number) -> Number:
    if operator in ("&&", "||"):
        decides = int(operator == "||")
        states = [None if value is None else int(value != 0) for value in (left, right)]
        return decides if decides in states else None if None in states else 1 - decides
    if left is None or right is None:
        return None
    if operator in ("/", "%"):
        if not right:
            return None
        # A shell rounds towards zero.
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if operator == "/" else left - quotient * right
    if operator in ("**", "<<", ">>") and not 0 <= right < 63:
        return None
    value = int(_OPERATIONS[operator](left, right))
    return value if abs(value) < LARGEST else None


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "**": lambda a, b: a**b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
