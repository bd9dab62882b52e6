"""Recipes in Python (Megatron-Bridge, NeMo 2, torchtitan): the functions that make a configuration.

Nothing is run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.formats.facts.entries import Entries
from planner.formats.python.following import WHOLES, Follower, Function, Style
from planner.formats.python.values import Made

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
"""Keys by which a function that sets them is recognised as a recipe."""


MEGATRON = Style(
    lambda entries: any(path.rpartition(".")[2] in PARALLEL for path in entries),
    re.compile(rf"(?:.*\.)?(?:{'|'.join(WHOLES)})"),
)
"""The style of recipes of NeMo 2 and Megatron-Bridge."""


@dataclass(frozen=True)
class Recipe:
    """A function that makes a configuration."""

    name: str
    file: str
    entries: Entries
    models: tuple[str, ...]
    """Candidates for the recipe's model: texts of calls, and names of classes and functions."""
    bases: tuple[Made, ...]
    """Base configurations that the recipe changes, made by functions outside of the files."""
    changed_by: tuple[Made, ...]
    """Functions outside of the files that receive the configuration."""
    replaced: frozenset[str]
    """Paths of the parts of the configuration that the recipe makes anew."""
    files: Mapping[str, str]
    """The file of each key."""
    calls: frozenset[str]
    """Functions in the files that the recipe calls."""


def recipes(
    texts: Sequence[tuple[str, str]],
    define: Mapping[str, str] | None = None,
    style: Style = MEGATRON,
    named: str = "",
) -> dict[str, Recipe]:
    """The recipes of Python files by name; raises `InputError` where a file is not Python.

    Args:
        texts: name and text of each file; functions may call those of other files.
        define: values of parameters and constants that override those of the files.
        named: the name of a function that is a recipe although its degrees are set by others.
    """
    functions: dict[str, list[Function]] = {}
    modules: dict[tuple[str, str], str] = {}
    trees: list[tuple[str, ast.Module]] = []
    for file, text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # Python's warnings about the style of the file do not matter.
                trees.append((file, ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise InputError(f"file {file} is not valid Python") from None
    for file, tree in trees:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(Function(node, file))
    given = {name: _literal(text) for name, text in (define or {}).items()}
    found: dict[str, Recipe] = {}
    try:
        constants: dict[str, Any] = {}
        whole: list[Follower] = []
        for file, tree in trees:
            reader = Follower(functions, modules, given, constants, file, style)
            reader.block(tree.body, constants, 0)
            whole.append(reader)
        for name, (function, *_) in functions.items():
            reader = Follower(functions, modules, given, constants, function.file, style)
            reader.follow(function, {}, 0)
            _keep(found, name, reader, name == named and bool(reader.bases))
        for reader in whole:
            _keep(found, "<file>", reader)
    except RecursionError:
        raise InputError(f"file {texts[0][0]} is nested too deeply") from None
    return found


def chosen(
    texts: Sequence[tuple[str, str]], define: Mapping[str, str], style: Style = MEGATRON
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe of Python files that are given together, and the names of the others.

    It is the one named by `--define recipe=NAME`. Otherwise, among recipes that no other recipe calls, it is
    the first one for pre-training, or the first. Raises `InputError` where there is none, or none of that
    name.
    """
    others = {name: value for name, value in define.items() if name != "recipe"}
    file, named = texts[0][0], define.get("recipe", "")
    found = recipes(texts, others, style, named)
    if not found:
        raise InputError(f"file {file}: no function in it sets degrees of parallelism")
    if named and named not in found:
        raise InputError(f"file {file} has no recipe {named!r}; {nearest(named, found) or ', '.join(found)}")
    called = {name for recipe in found.values() for name in recipe.calls if name != recipe.name}
    roots = [name for name in found if name not in called] or [*found]
    first = next((name for name in roots if "pretrain" in name), roots[0])
    one = found[named or first]
    return one, tuple(name for name in found if name != one.name)


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, (int, float, str, bool, list)) or value is None else text


def _keep(found: dict[str, Recipe], name: str, reader: Follower, wanted: bool = False) -> None:
    if name in found or not (wanted or reader.style.is_recipe(reader.entries)):
        return
    found[name] = Recipe(
        name,
        reader.file,
        reader.entries,
        tuple(dict.fromkeys(reader.models)),
        tuple(reader.bases.values()),
        tuple(reader.changed_by.values()),
        frozenset(reader.replaced),
        reader.files,
        frozenset(reader.followed),
    )
