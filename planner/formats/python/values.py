"""Values of expressions in Python, computed from the syntax tree of constants. Nothing is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 10_000
"""Most items of a list, and most characters of a text."""


class Unresolved(str):
    """An expression with an unknown value, as source text."""


class Made(Unresolved):
    """The value for a function outside of the files: the function's name."""

    line: int
    module: str


class Call(Made):
    """The value for a call of a function outside of the files, with its arguments."""

    listed: list[Any]
    given: dict[str, Any]


class Part(str):
    """A part of the configuration, by its path; the empty text is the whole."""


def written(node: ast.AST) -> str:
    """The source text of an expression, shortened."""
    return ast.unparse(node)[:80]


def is_known(value: Any) -> bool:
    """Return whether a value is a constant, in all its items."""
    if isinstance(value, (list, dict)):
        return all(map(is_known, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (Unresolved, Part))


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}

_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: _contains(right, left),
    ast.NotIn: lambda left, right: not _contains(right, left),
}


def _contains(whole: Any, part: Any) -> bool:
    return (key_of(part) if isinstance(whole, dict) else part) in whole


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "min": min,
    "max": max,
    "sum": sum,
    "list": list,
    "tuple": list,
    "abs": abs,
}
"""Built-in functions that are evaluated."""


METHODS = ("lower", "upper", "strip")
"""Methods of texts that are evaluated."""


def computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    """The value of a sum, product or similar operation; `Unresolved` where it has no value, or one that is
    too large."""
    unknown = Unresolved(written(node))
    act = _OPERATORS.get(type(node.op))
    numbers = all(type(side) in (int, float, bool) and abs(side) < 1 << 40 for side in (left, right))
    if act is not None and numbers:
        try:
            return act(left, right)
        except ZeroDivisionError:
            return unknown
    if isinstance(node.op, ast.Add) and _same_sequence(left, right) and len(left) + len(right) <= LARGEST:
        return left + right
    for one, count in ((left, right), (right, left)):
        sequence = isinstance(one, list) or (isinstance(one, str) and is_known(one))
        if isinstance(node.op, ast.Mult) and sequence and type(count) is int and len(one) * count <= LARGEST:
            return one * count
    return unknown


def key_of(value: Any) -> Any:
    """A value as the key of a dictionary; `Unresolved` where it is none."""
    if isinstance(value, list):
        return tuple(map(key_of, value)) if is_known(value) else Unresolved("key")
    return Unresolved("key") if isinstance(value, dict) else value


def item(node: ast.AST, held: Any, place: Any) -> Any:
    """The item of a dictionary or a list; `Unresolved` where there is none, or where it is not known."""
    unknown = Unresolved(written(node))
    if not is_known(place):
        return unknown
    try:
        return held[key_of(place)] if isinstance(held, (dict, list)) else unknown
    except (KeyError, IndexError, TypeError):
        return unknown


def _same_sequence(left: Any, right: Any) -> bool:
    lists = isinstance(left, list) and isinstance(right, list)
    return lists or (isinstance(left, str) and isinstance(right, str) and is_known([left, right]))


def compared(node: ast.Compare, values: list[Any]) -> Any:
    """The truth of a comparison; `Unresolved` where a side is not known."""
    unknown = Unresolved(written(node))
    if not is_known(values):
        return unknown
    try:
        pairs = zip(node.ops, values, values[1:], strict=False)
        return all(bool(_COMPARISONS[type(op)](left, right)) for op, left, right in pairs)
    except (TypeError, KeyError):
        return unknown


def called(name: str, arguments: list[Any]) -> Any:
    """The value of a call of a built-in function; `Unresolved` for None."""
    if name not in FUNCTIONS or not is_known(arguments):
        return Unresolved(name)
    try:
        return FUNCTIONS[name](*arguments)
    except (TypeError, ValueError, OverflowError):
        return Unresolved(name)
