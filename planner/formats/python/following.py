"""Values that functions of Python files set, found by reading statements in order with known values of
parameters and constants.

Only the syntax tree is read. Known values choose the branch of an `if`. If the branch is unknown, values that
the branches set differently are unknown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import PurePath
from typing import Any

from costmodels.dataclass import dataclass
from planner.formats.facts.entries import MOST_ENTRIES, Entries, Entry
from planner.formats.python.values import (
    FUNCTIONS,
    LARGEST,
    METHODS,
    Call,
    Made,
    Part,
    Unresolved,
    called,
    compared,
    computed,
    is_known,
    item,
    key_of,
    written,
)

DEEPEST = 12
"""Deepest nesting of function calls that is followed."""

MOST_CALLS = 400

MAKERS = ("Config", "Partial")
"""nemo_run's functions that create the object named by their first argument."""

WHOLES = ("Partial", "ConfigContainer")
"""Functions that make a whole configuration."""

LAYOUT = "pipeline_model_parallel_layout"
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Letters for the layers of a stage in Megatron-LM's layout notation."""


@dataclass(frozen=True)
class Style:
    """The form in which a software's recipes are written."""

    is_recipe: Callable[[Entries], bool]
    """A test if the entries set by a function are a recipe."""
    whole: re.Pattern[str]
    """Names of calls that make a whole configuration."""
    nested: bool = False
    """True if sections are arguments of that call, and are made by calls themselves."""


@dataclass(frozen=True)
class Function:
    """A function of one of the files."""

    node: ast.FunctionDef
    file: str


@dataclass
class Follower:
    """The reader of one function, or of a file's statements, and the values set so far."""

    functions: Mapping[str, Sequence[Function]]
    """The functions of each name, in the order of the files."""
    modules: dict[tuple[str, str], str]
    """Modules of imported names, by file and name."""
    given: Mapping[str, Any]
    constants: Mapping[str, Any]
    file: str
    style: Style
    entries: Entries = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    bases: dict[str, Made] = field(default_factory=dict)
    changed_by: dict[str, Made] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    followed: set[str] = field(default_factory=set)
    calls: int = 0

    def follow(self, function: Function, arguments: Mapping[str, Any], depth: int) -> Any:
        """Read the statements of a function, its parameters bound to `arguments` or to their defaults; return
        its value."""
        self.calls += 1
        if depth > DEEPEST or self.calls > MOST_CALLS:
            return Unresolved(function.node.name)
        every = function.node.args
        names = [argument.arg for argument in (*every.posonlyargs, *every.args)]
        defaults = dict(zip(names[::-1], every.defaults[::-1], strict=False))
        only = zip(every.kwonlyargs, every.kw_defaults, strict=True)
        defaults |= {argument.arg: value for argument, value in only if value is not None}
        known: dict[str, Any] = {**self.constants}
        for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs):
            known[argument.arg] = Unresolved(argument.arg)
        known |= {name: self.value(value, known, depth) for name, value in defaults.items()}
        known |= {
            name: self.given[name]
            for name in (*names, *(one.arg for one in every.kwonlyargs))
            if name in self.given
        }
        known |= {name: value for name, value in arguments.items() if type(value) is not Unresolved}
        outside, self.file = self.file, function.file
        returned, value = self.block(function.node.body, known, depth)
        self.file = outside
        return value if returned else None

    def block(self, body: Sequence[ast.stmt], known: dict[str, Any], depth: int) -> tuple[bool, Any]:
        """Read statements in order; return whether they return from the function, and the value returned."""
        for node in body:
            returned, value = self._statement(node, known, depth)
            if returned:
                return True, value
        return False, None

    def _statement(self, node: ast.stmt, known: dict[str, Any], depth: int) -> tuple[bool, Any]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            return False, None
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.modules[self.file, alias.asname or alias.name] = f"{node.module or '.'}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.modules[self.file, alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.Return):
            return True, None if node.value is None else self.value(node.value, known, depth)
        elif isinstance(node, ast.If):
            return self._choice(node, known, depth)
        elif isinstance(node, (ast.With, ast.For, ast.While, ast.Try)):
            return self._inner(node, known, depth)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            if node.value is not None:
                self._assign(node, known, depth)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, known, depth)
        return False, None

    def _assign(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, known: dict[str, Any], depth: int
    ) -> None:
        assert node.value is not None
        value = self.value(node.value, known, depth)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(node, ast.AugAssign):
                joined = ast.BinOp(_loaded(node.target), node.op, node.value)
                value = computed(joined, self.value(_loaded(node.target), known, depth), value)
            if isinstance(target, ast.Name):
                own = depth == 0 and target.id in self.given and known is self.constants
                known[target.id] = self.given[target.id] if own else value
                continue
            path = self._path(target, known)
            if path and _converts(node.value, target) and not is_known(value):
                continue  # `x = float(x)`
            if path and isinstance(node.value, ast.Call) and not is_known(value):
                self.replaced.add(path)
                self._drop(path)
                if isinstance(value, Call):
                    self._spread(path, value)
                else:
                    name = (value if isinstance(value, Made) else written(node.value.func)).rpartition(".")[2]
                    if name == written(node.value.func) and _is_short_call(node.value):
                        name = written(node.value)
                    self._set(path, name if name[:1].isupper() else Unresolved(name), node.lineno)
            elif path and isinstance(value, Call):
                self._drop(path)
                self._spread(path, value)
            elif path:
                self._set(path, value, node.lineno)

    def _choice(self, node: ast.If, known: dict[str, Any], depth: int) -> tuple[bool, Any]:
        """Read the branch of an `if` that runs; if unknown, keep the values common to both."""
        test = self.value(node.test, known, depth)
        if is_known(test):
            return self.block(node.body if test else node.orelse, known, depth)
        before = dict(self.entries), dict(self.values), dict(known)
        first = self.block(node.body, known, depth)
        after = dict(self.entries), dict(self.values), dict(known)
        for now, old in zip((self.entries, self.values, known), before, strict=True):
            now.clear()
            now.update(old)  # type: ignore[arg-type]
        second = self.block(node.orelse, known, depth)
        why = Unresolved(written(node.test))
        for path in [*after[0], *self.entries]:
            one, other = after[0].get(path), self.entries.get(path)
            if one is None or other is None or one.text != other.text:
                stands = one or other
                assert stands is not None
                self.entries[path] = Entry(path, _text(why), stands.line)
                self.values[path] = why
        for name in [*after[2], *known]:
            if name not in known or name not in after[2] or not _same(known[name], after[2][name]):
                known[name] = why
        returned = first[0] and second[0]
        same = returned and _same(first[1], second[1])
        return returned, first[1] if same else why

    def _inner(self, node: ast.stmt, known: dict[str, Any], depth: int) -> tuple[bool, Any]:
        """Read the body of a `with`, of a `try`, or of a loop, once."""
        if isinstance(node, ast.With):
            for item in node.items:
                self.value(item.context_expr, known, depth)
            return self.block(node.body, known, depth)
        if isinstance(node, ast.Try):
            return self.block([*node.body, *node.orelse, *node.finalbody], known, depth)
        if isinstance(node, ast.For):
            self.value(node.iter, known, depth)
            for each in ast.walk(node.target):
                if isinstance(each, ast.Name):
                    known[each.id] = Unresolved(each.id)
            self.block(node.body, known, depth)
        elif isinstance(node, ast.While):
            self.block(node.body, known, depth)
        return False, None

    def value(self, node: ast.expr, known: dict[str, Any], depth: int) -> Any:
        """The value of an expression; settings made by its calls are kept."""
        if isinstance(node, ast.Constant):
            return node.value if not isinstance(node.value, (bytes, complex)) else Unresolved(written(node))
        if isinstance(node, ast.Name):
            return known.get(node.id, Unresolved(node.id))
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item, known, depth) for item in node.elts[:LARGEST]]
        if isinstance(node, ast.Dict):
            keys = [None if key is None else key_of(self.value(key, known, depth)) for key in node.keys]
            items = [self.value(value, known, depth) for value in node.values]
            if len(keys) > LARGEST or None in node.keys or not all(map(is_known, keys)):
                return Unresolved(written(node))
            return dict(zip(keys, items, strict=True))
        if isinstance(node, ast.Subscript):
            held, place = self.value(node.value, known, depth), self.value(node.slice, known, depth)
            return item(node, held, place)
        if isinstance(node, ast.ListComp):
            return self._each(node, known, depth)
        if isinstance(node, ast.Call):
            return self._call(node, known, depth)
        if isinstance(node, ast.Attribute):
            path = self._path(node, known)
            if written(node) in DTYPES and _root(node) not in known:
                return DTYPES[written(node)]
            if not path or _root(node) not in known:
                self.value(node.value, known, depth)
                return Unresolved(written(node))
            held = self.values.get(path)
            return held if path in self.values and is_known(held) else Part(path)
        if isinstance(node, ast.BinOp):
            return computed(node, self.value(node.left, known, depth), self.value(node.right, known, depth))
        if isinstance(node, ast.Compare):
            return compared(node, [self.value(side, known, depth) for side in (node.left, *node.comparators)])
        if isinstance(node, ast.BoolOp):
            return self._both(node, known, depth)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, known, depth)
            if isinstance(node.op, ast.Not) and is_known(value):
                return not value
            number = isinstance(value, (int, float))
            return -value if isinstance(node.op, ast.USub) and number else Unresolved(written(node))
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, known, depth)
            if is_known(test):
                return self.value(node.body if test else node.orelse, known, depth)
            one, other = self.value(node.body, known, depth), self.value(node.orelse, known, depth)
            return one if _same(one, other) else Unresolved(written(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not isinstance(node, ast.Lambda):
                self.value(child, known, depth)
        return Unresolved(written(node))

    def _each(self, node: ast.ListComp, known: dict[str, Any], depth: int) -> Any:
        """The value of a list that is made of the items of another one."""
        (first, *others), target = node.generators, node.generators[0].target
        items = self.value(first.iter, known, depth)
        if others or first.ifs or not isinstance(target, ast.Name) or not isinstance(items, list):
            return Unresolved(written(node))
        return [self.value(node.elt, {**known, target.id: one}, depth) for one in items]

    def _both(self, node: ast.BoolOp, known: dict[str, Any], depth: int) -> Any:
        """The value of `and` and `or`, with short-circuit evaluation."""
        decides = isinstance(node.op, ast.Or)
        unknown = False
        value: Any = None
        for side in node.values:
            value = self.value(side, known, depth)
            if not is_known(value):
                unknown = True
            elif bool(value) is decides:
                return Unresolved(written(node)) if unknown else value
        return Unresolved(written(node)) if unknown else value

    def _call(self, call: ast.Call, known: dict[str, Any], depth: int) -> Any:
        function = written(call.func)
        name = function.rpartition(".")[2]
        if isinstance(call.func, ast.Attribute):
            of = self.value(call.func.value, known, depth)
            if name in METHODS and isinstance(of, str) and is_known(of) and not (call.args or call.keywords):
                return getattr(of, name)()
        listed = [self.value(one, known, depth) for one in call.args if not isinstance(one, ast.Starred)]
        arguments = {
            one.arg: self.value(one.value, known, depth) for one in call.keywords if one.arg is not None
        }
        self.models.append(name)
        self.models += [
            one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        if name == "from_hf_pretrained":
            self.models += [one for one in listed if isinstance(one, str) and is_known(one)]
        local = self._local(call.func)
        if local is not None:
            self.followed.add(local.node.name)
            names = [argument.arg for argument in (*local.node.args.posonlyargs, *local.node.args.args)]
            return self.follow(local, {**dict(zip(names, listed, strict=False)), **arguments}, depth + 1)
        first = call.args[0] if call.args else None
        if isinstance(first, (ast.Name, ast.Attribute)):
            class_name = written(first).rpartition(".")[2]
            self.models.append(class_name)
            if name in MAKERS or class_name[:1].isupper():
                name = class_name  # run.Config(Class, ...), run.Partial(function, ...)
        if not self.style.nested:
            for key, value in arguments.items():
                self._set(f"{name}.{key}", value, call.lineno)
        if function in FUNCTIONS:
            return called(function, listed)
        if function == "getattr" and len(listed) > 1 and isinstance(listed[0], Part) and is_known(listed[1]):
            held = self.values.get(f"{listed[0]}.{listed[1]}".lstrip("."), Unresolved(written(call)))
            return held if is_known(held) else Unresolved(written(call))
        if name == "get" and isinstance(call.func, ast.Attribute) and listed and is_known(listed[0]):
            held = self.value(call.func.value, known, depth)
            if isinstance(held, dict):
                return held.get(key_of(listed[0]), listed[1] if len(listed) > 1 else None)
        if isinstance(call.func, ast.Attribute) and name in ("append", "extend") and len(listed) == 1:
            held = self.value(call.func.value, known, depth)
            if isinstance(held, list) and len(held) < LARGEST:
                held += listed if name == "append" else listed[0] if isinstance(listed[0], list) else listed
                return None
        made = self._made(function, call.lineno)
        whole = [
            one
            for one in listed
            if (isinstance(one, Made) and not self.style.nested)
            or (one == Part("") and isinstance(one, Part))
        ]
        if whole and isinstance(call.func, ast.Name):
            self.changed_by[function] = made
            return whole[0]
        if self.style.nested:
            made = self._call_of(made, listed, arguments)
        if self.style.whole.fullmatch(function):
            if isinstance(made, Call):
                self._spread("", made)
            return Part("")
        if isinstance(made, Call):
            return made
        return made if not function.rpartition(".")[2][:1].isupper() else Unresolved(name)

    def _call_of(self, made: Made, listed: list[Any], arguments: dict[str, Any]) -> Call:
        call = Call(made)
        call.line, call.module, call.listed, call.given = made.line, made.module, listed, arguments
        return call

    def _spread(self, path: str, call: Call) -> None:
        """Set a section of the configuration from the arguments of the call that makes it."""
        at = f"{path}." if path else ""
        if path:
            # A class is a section; what a function makes may be one, or a value that is not known.
            is_class = call.rpartition(".")[2][:1].isupper()
            name = call.module or str(call)
            self._set(path, name if is_class else Unresolved(name), call.line)
        pairs = [*((str(place), value) for place, value in enumerate(call.listed)), *call.given.items()]
        for key, value in pairs:
            inner = [value] if isinstance(value, Call) else value if isinstance(value, list) else []
            if isinstance(value, Call):
                self._spread(f"{at}{key}", value)
            elif inner and all(isinstance(one, Call) for one in inner):
                for place, one in enumerate(inner):
                    self._spread(f"{at}{key}.{place}", one)
            else:
                self._set(f"{at}{key}", value, call.line)

    def _made(self, function: str, line: int) -> Made:
        made = Made(function)
        first, _, rest = function.partition(".")
        module = self.modules.get((self.file, first), "")
        made.line, made.module = line, f"{module}.{rest}".rstrip(".") if module else ""
        return made

    def _local(self, function: ast.expr) -> Function | None:
        """The function in the files that a call names, directly or by an imported name."""
        if not isinstance(function, (ast.Name, ast.Attribute)):
            return None
        name = written(function)
        first, _, rest = name.partition(".")
        imported = self.modules.get((self.file, first), "")
        whole = f"{imported}.{rest}".rstrip(".") if imported else name
        module, _, last = whole.rpartition(".")
        # Files that are given together may have functions of one name: the file's own comes first, then that
        # of the file whose path is most like the imported module's.
        for _ in range(DEEPEST):
            again = self._exported(module, last)
            if not again:
                break
            module, _, last = again.rpartition(".")
        own = [one for one in self.functions.get(name, ()) if one.file == self.file]
        shared = [(_shared_parts(module, one.file), one) for one in self.functions.get(last, ())]
        others = [pair for pair in shared if pair[0] and pair[1].file != self.file]
        if not own and others:
            return max(others, key=lambda pair: pair[0])[1]
        if own or name in self.functions:
            return (own or self.functions[name])[0]
        if not imported or _is_software(imported):
            return None
        return next((one for one in self.functions.get(last, ()) if one.file != self.file), None)

    def _exported(self, module: str, name: str) -> str:
        """The full name of a function that the module of a file imports by a name, or the empty text."""
        of_files = [
            (_shared_parts(module, file), whole) for (file, own), whole in self.modules.items() if own == name
        ]
        best = max(of_files, key=lambda pair: pair[0], default=(0, ""))
        return best[1] if best[0] else ""

    def _path(self, target: ast.expr, known: Mapping[str, Any]) -> str:
        """The path `model.num_layers` of `cfg.model.num_layers`; empty for other expressions."""
        parts: list[str] = []
        node = target
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not parts or not isinstance(node, ast.Name):
            return ""
        held = known.get(node.id)
        if isinstance(held, Made) and isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
            self.bases.setdefault(held, held)
        if isinstance(held, Part) and held:
            parts.insert(0, held)
        return ".".join(parts)

    def _drop(self, path: str) -> None:
        """Remove the values of a part of the configuration that is made anew."""
        for old in [one for one in self.entries if one.startswith(f"{path}.")]:
            del self.entries[old]
            self.values.pop(old, None)

    def _set(self, path: str, value: Any, line: int) -> None:
        if len(self.entries) > MOST_ENTRIES:
            return
        if isinstance(value, dict):
            value = Unresolved(str(value)[:80])
        self.entries.pop(path, None)  # The last value set stands last.
        self.values[path] = value
        self.files[path] = self.file
        if path.rpartition(".")[2] == LAYOUT and isinstance(value, list):
            self.entries[path] = Entry(path, _layout(value), line)
        elif isinstance(value, list):
            items = tuple(_text(item) for item in value)
            self.entries[path] = Entry(path, ",".join(items), line, items)
        else:
            self.entries[path] = Entry(path, _text(value), line)


def _root(node: ast.expr) -> str:
    """The first name of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _converts(value: ast.expr, target: ast.expr) -> bool:
    """Return whether a value is its target in another type, such as `float(cfg.x)` for `cfg.x`."""
    if not isinstance(value, ast.Call) or written(value.func) not in FUNCTIONS or len(value.args) != 1:
        return False
    return written(value.args[0]) == written(target)


def _is_short_call(call: ast.Call) -> bool:
    """Return whether a function is called with nothing but a text."""
    given = [*call.args, *(one.value for one in call.keywords)]
    return len(given) == 1 and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str)


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression to read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return target


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
"""PyTorch's number formats by Megatron-LM's names."""


def _shared_parts(module: str, file: str) -> int:
    """The number of last parts that the name of a module and the path of a file have in common."""
    pairs = zip(module.split(".")[::-1], PurePath(file).with_suffix("").parts[::-1], strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), module.count(".") + 1)


SOFTWARE = ("megatron", "nemo", "nemo_run", "torch", "transformers")


def _is_software(module: str) -> bool:
    return module.partition(".")[0] in SOFTWARE


def _layout(stages: list[Any]) -> str:
    """Megatron-LM's layout notation for a list of the layers of each stage."""
    listed = [stage if isinstance(stage, list) else [stage] for stage in stages]
    layers = [layer for stage in listed for layer in stage]
    if not all(layer in LETTERS for layer in layers):
        return _text(Unresolved(str(stages)[:80]))
    return "|".join("".join(LETTERS[layer] for layer in stage) for stage in listed)


def _text(value: Any) -> str:
    if isinstance(value, (Unresolved, Part)):
        return f"${{{value}}}"
    if isinstance(value, list):
        return str(value) if is_known(value) else f"${{{str(value)[:80]}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
