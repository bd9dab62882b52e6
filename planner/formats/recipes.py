"""Recipes in Python (Megatron-Bridge, NeMo 2): what functions set, from the syntax tree. Nothing is run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.formats.entries import MOST_ENTRIES, Entries, Entry

DEEPEST = 6
"""Functions that call each other, beyond which they are not followed."""

MOST_CALLS = 400

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
"""What a function sets that is a recipe."""

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class Unresolved(str):
    """An expression whose value is not known, as it is written."""


@dataclass(frozen=True)
class Recipe:
    """A function that makes a configuration."""

    name: str
    entries: Entries
    models: tuple[str, ...]
    """What it names that could be its model: texts of calls, and names of classes and functions."""


def recipes(text: str, origin: str) -> dict[str, Recipe]:
    """The recipes of a Python file by name; raises `InputError` where it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"{origin} is not valid Python") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants = _constants(tree.body, {})
    found: dict[str, Recipe] = {}
    try:
        for name, function in functions.items():
            reader = _Reader(functions, constants)
            reader.follow(function, {}, 0)
            _keep(found, name, reader)
        reader = _Reader(functions, constants)
        reader.statements(tree.body, constants, 0)
        _keep(found, "<file>", reader)
    except RecursionError:
        raise InputError(f"{origin} is nested too deeply") from None
    return found


def _keep(found: dict[str, Recipe], name: str, reader: _Reader) -> None:
    if any(path.rpartition(".")[2] in PARALLEL for path in reader.entries):
        found[name] = Recipe(name, reader.entries, tuple(dict.fromkeys(reader.models)))


def _constants(body: list[ast.stmt], known: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(known)
    for node in body:
        target: ast.expr | None = None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
        if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            values[target.id] = value_of(node.value, values)
    return values


def value_of(node: ast.expr, known: Mapping[str, Any], depth: int = 0) -> Any:
    """The value of constants, names of constants, lists, and whole numbers that are added or multiplied."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, Unresolved(node.id))
    if isinstance(node, (ast.List, ast.Tuple)) and depth < DEEPEST:
        return [value_of(item, known, depth + 1) for item in node.elts[:1000]]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = value_of(node.operand, known, depth + 1) if depth < DEEPEST else None
        return -value if isinstance(value, (int, float)) else Unresolved(_written(node))
    if isinstance(node, ast.BinOp) and depth < DEEPEST:
        left, right = (value_of(side, known, depth + 1) for side in (node.left, node.right))
        act = _OPERATORS.get(type(node.op))
        small = all(type(side) is int and abs(side) < 1 << 40 for side in (left, right))
        if act is not None and small and not (isinstance(node.op, ast.FloorDiv) and right == 0):
            return act(left, right)
    return Unresolved(_written(node))


def _written(node: ast.AST) -> str:
    return ast.unparse(node)[:80]


@dataclass
class _Reader:
    functions: Mapping[str, ast.FunctionDef]
    constants: Mapping[str, Any]
    entries: Entries = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    calls: int = 0

    def follow(self, function: ast.FunctionDef, given: Mapping[str, Any], depth: int) -> None:
        """What a function sets, its parameters bound to `given` or to their defaults."""
        self.calls += 1
        if depth > DEEPEST or self.calls > MOST_CALLS:
            return
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        defaults = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
        only = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        defaults |= {argument.arg: value for argument, value in only if value is not None}
        known = {**self.constants}
        known |= {name: value_of(value, known) for name, value in defaults.items()}
        known |= {name: value for name, value in given.items() if not isinstance(value, Unresolved)}
        self.statements(function.body, known, depth)

    def statements(self, body: list[ast.stmt], known: Mapping[str, Any], depth: int) -> None:
        """What statements set, in order: later ones replace earlier ones."""
        values = _constants(body, known)
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                continue
            for inner in _expressions(node):
                if isinstance(inner, ast.Call):
                    self._call(inner, values, depth)
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    path = _path(target)
                    if path and not isinstance(node.value, ast.Call):
                        self._set(path, value_of(node.value, values), node.lineno)
                    elif path and isinstance(node.value, ast.Call):
                        self._set(path, _written(node.value.func).rpartition(".")[2], node.lineno)

    def _call(self, call: ast.Call, values: Mapping[str, Any], depth: int) -> None:
        name = _written(call.func).rpartition(".")[2]
        arguments = {one.arg: value_of(one.value, values) for one in call.keywords if one.arg is not None}
        self.models.append(name)
        self.models += [
            one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        first = call.args[0] if call.args else None
        if isinstance(first, (ast.Name, ast.Attribute)):
            name = _written(first).rpartition(".")[2]  # run.Config(Class, ...), run.Partial(function, ...)
            self.models.append(name)
        local = self.functions.get(_written(call.func))
        if local is not None:
            self.follow(local, arguments, depth + 1)
            return
        for key, value in arguments.items():
            self._set(f"{name}.{key}", value, call.lineno)

    def _set(self, path: str, value: Any, line: int) -> None:
        if len(self.entries) > MOST_ENTRIES:
            return
        if isinstance(value, list):
            items = tuple(_text(item) for item in value)
            self.entries[path] = Entry(path, ",".join(items), line, items)
        else:
            self.entries[path] = Entry(path, _text(value), line)


def _text(value: Any) -> str:
    if isinstance(value, Unresolved):
        return f"${{{value}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a statement from the inside out, so that what is outside replaces what is inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _expressions(child)
    yield node


def _path(target: ast.expr) -> str:
    """`model.num_layers` of `cfg.model.num_layers`; empty for what is no attribute of a name."""
    written = _written(target) if isinstance(target, ast.Attribute) else ""
    return written.partition(".")[2] if re.fullmatch(r"\w+(\.\w+)+", written) else ""
