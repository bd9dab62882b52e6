"""Faults drawn by lot, for `planted_faults`: `python -m benchmarks.drawn_faults --seed 1 -o LIST.yaml`.

A hand-written list has only faults that its author thought of. This program finds all places of the numerical
modules where one change leaves a program that still runs, and draws from them. A change is one of a sign, a
factor, a border, an axis, a mask, a reduction or a gradient. Rules leave out code that computes no numbers:
checks of arguments, messages, names and paths.

Some changes do not change any result. `drawn_faults_equal.yaml` names those that were drawn, each with the
reason. The next change of the draw replaces each of these, and each that an earlier list has.
"""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
import yaml

from benchmarks.planted_faults import ROOT, Fault, read_faults
from planner.options.flags import run

EQUAL = Path(__file__).with_name("drawn_faults_equal.yaml")
"""File with the names of drawn faults that change no result, each with the reason."""

NUMERICS = (
    *("model/*.py", "optimizers/*.py", "train/*.py", "parallel/*.py", "faults/step_guard.py"),
    *("settings/learning_rate.py", "settings/loss_scale.py", "settings/batch_ramp.py"),
    *("data/samples.py", "data/blend.py", "data/packing.py", "data/boundaries.py", "data/datasets.py"),
    *("generation/sampling.py", "generation/cache.py", "generation/generator.py", "generation/stage.py"),
    *("job/metrics.py", "huggingface/mapping.py", "checkpoint/tensors.py"),
)
"""Modules of the runtime that compute numbers."""

NO_NUMERICS = {
    *("parallel/accelerator.py", "parallel/cores.py", "parallel/meeting.py", "parallel/ranks.py"),
    *("parallel/send_limit.py", "parallel/offload.py", "parallel/local_tensors.py"),
}
"""Modules of the runtime that only choose devices, or place and time of memory."""

OPERATORS: dict[type[ast.AST], str] = {
    **dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv), ("+", "-", "*", "/", "//"), strict=True)),
    **dict(zip((ast.Lt, ast.LtE, ast.Gt, ast.GtE), ("<", "<=", ">", ">="), strict=True)),
    **dict(zip((ast.Eq, ast.NotEq, ast.BitAnd, ast.BitOr), ("==", "!=", "&", "|"), strict=True)),
    **dict(zip((ast.And, ast.Or), ("and", "or"), strict=True)),
}

SWAPPED = {
    one: other
    for pair in (("+", "-"), ("*", "/"), ("&", "|"), ("and", "or"), ("<", "<="), (">", ">="), ("==", "!="))
    for one, other in (pair, pair[::-1])
}

KINDS = {ast.Add: "sign", ast.Sub: "sign", ast.BitAnd: "mask", ast.BitOr: "mask"}

OTHER_NAMES = {
    one: other
    for pair in (
        *(("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("sum", "mean")),
        *(("any", "all"), ("floor", "ceil"), ("zeros_like", "ones_like"), ("zeros", "ones"), ("cos", "sin")),
        *(("new_zeros", "new_ones"), ("add_", "sub_"), ("mul_", "div_"), ("exp", "expm1"), ("log", "log1p")),
    )
    for one, other in (pair, pair[::-1])
}

WITHOUT = {
    *("abs", "square", "sqrt", "rsqrt", "float", "double", "masked_fill", "clamp", "clone", "detach"),
    *("floor", "reciprocal", "flip", "sigmoid", "softmax", "cumsum", "sign", "tanh", "logical_not", "tril"),
    *("triu", "roll", "neg", "silu", "gelu", "softplus", "sorted", "reversed", "rotate", "all_reduce"),
    *("round", "index_fill", "nan_to_num", "log", "exp", "normalize", "sort"),
}
"""Calls whose result has the shape of their argument, so that the argument can replace the call."""

ALONG = {"softmax", "cumsum", "flip", "sort", "argsort", "roll", "log_softmax", "sum", "mean", "amax", "topk"}
"""Calls whose axis may be changed."""

SAID = {
    *("non_blocking", "strict", "async_op", "inplace", "persistent", "recurse", "pin_memory", "fullgraph"),
    *("weights_only", "skipped", "scale_grads", "copy", "use_reentrant", "remove_duplicate"),
    *("daemon", "preserve_rng_state"),
}
"""Boolean arguments that change no number, or whose other value PyTorch refuses."""

SILENT = {
    *("print", "log", "warn", "isinstance", "hasattr", "getattr", "setattr", "set_operation", "super"),
    *(
        "InputError",
        "ValueError",
        "RuntimeError",
        "join",
        "format",
        "startswith",
        "endswith",
        "get_group",
        "field",
    ),
}
"""Calls whose arguments hold no numbers."""

TEXTS = ("path", "folder", "name", "text", "word", "line", "prefix", "key", "message", "title")
"""Parts of names of values that are no numbers."""

MODULES = ("torch", "F", "math", "np", "dist")
"""Modules whose functions take their operand as the first argument."""

GENERAL = [f"tests/runtime/test_{name}.py" for name in ("model", "training", "parity", "parity_mixed")]
"""Test files that a fault of any module may break."""

UNCOUNTED = ("check", "describe", "require", "refuse", "warn", "remedy", "forget", "free", "move", "told")
"""Beginnings of names of functions that check, print or allocate."""

Node = ast.expr | ast.stmt


@dataclass(frozen=True)
class Change:
    """One place of a file, and its replacement."""

    kind: str
    where: str
    """Name of the function that holds the place."""
    line: int
    first: int
    """Offset of the first byte of the place in the file; `end` is the offset after its last byte."""
    end: int
    new: str


class _Places(ast.NodeVisitor):
    """Collects the changes of one file."""

    def __init__(self, source: str) -> None:
        self.source, self.changes = source.encode(), list[Change]()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.within: list[str] = []
        self.statement: ast.stmt | None = None

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = node
        if _is_silent(node):
            return
        getattr(self, f"_of_{type(node).__name__.lower()}", lambda _: None)(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def _of_functiondef(self, node: ast.FunctionDef) -> None:
        # The name holds for what follows, up to the next definition: enough to find the place again.
        self.within = [*self.within[:1], node.name] if node.col_offset else [node.name]

    def _of_classdef(self, node: ast.ClassDef) -> None:
        self.within = [node.name]

    def _span(self, node: Node | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: Node) -> str:
        first, end = self._span(node)
        return self.source[first:end].decode()

    def _add(self, kind: str, node: Node | tuple[int, int], new: str) -> None:
        first, end = node if isinstance(node, tuple) else self._span(node)
        assert self.statement is not None
        place = ".".join(self.within)
        self.changes.append(Change(kind, place, self.statement.lineno, first, end, new))

    def _swap(self, kind: str, left: Node, operator: ast.AST, right: Node) -> None:
        """Record a change of the operator between two operands."""
        old = OPERATORS.get(type(operator), "")
        between = self._span(left)[1], self._span(right)[0]
        text = self.source[slice(*between)].decode()
        if old in SWAPPED and text.count(old) == 1 and "#" not in text:
            self._add(kind, between, text.replace(old, SWAPPED[old]))

    def _of_binop(self, node: ast.BinOp) -> None:
        if any(map(_is_text, (node.left, node.right))) or "None" in self._text(node):
            return
        if isinstance(node.op, ast.BitOr) and self._text(node.right)[0].isupper():
            # A union of types.
            return
        kind = KINDS.get(type(node.op), "factor")
        self._swap(kind, node.left, node.op, node.right)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.BitAnd | ast.BitOr):
            self._add(f"{kind} lost", node, self._text(node.left))
            if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
                self._add(f"{kind} lost", node, self._text(node.right))
        if isinstance(node.op, ast.FloorDiv) and not isinstance(node.left, ast.UnaryOp):
            self._add(
                "count", node, f"-(-{_wrapped(self._text(node.left))} // {_wrapped(self._text(node.right))})"
            )

    def _of_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div) and not _is_text(node.value):
            self._swap("sign", node.target, node.op, node.value)
            self._add("term lost", node, f"{self._text(node.target)} = {self._text(node.value)}")
            self._add("step lost", node, "pass")

    def _of_compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        if any(map(_is_text, sides)):
            return
        for left, operator, right in zip(sides, node.ops, node.comparators, strict=False):
            is_border = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            self._swap("border" if is_border else "condition", left, operator, right)

    def _of_boolop(self, node: ast.BoolOp) -> None:
        if any("is None" in self._text(one) or "is not None" in self._text(one) for one in node.values):
            return
        for number, (left, right) in enumerate(zip(node.values, node.values[1:], strict=False)):
            if not number:
                self._add("condition", node, self._text(left))
            self._swap("condition", left, node.op, right)

    def _of_unaryop(self, node: ast.UnaryOp) -> None:
        inner = node.operand
        if isinstance(inner, ast.BinOp) and isinstance(inner.left, ast.UnaryOp):
            # Division that rounds up.
            if isinstance(inner.op, ast.FloorDiv):
                self._add("count", node, f"({self._text(inner.left.operand)} // {self._text(inner.right)})")
        elif not isinstance(node.operand, ast.Constant):
            self._add("mask" if isinstance(node.op, ast.Invert) else "sign", node, self._text(node.operand))

    def _of_ifexp(self, node: ast.IfExp) -> None:
        if not _is_text(node) and not any(
            isinstance(one, ast.Constant) and one.value is None for one in (node.body, node.orelse)
        ):
            self._add("condition", node, self._text(node.body))
            self._add("condition", node, self._text(node.orelse))

    def _of_subscript(self, node: ast.Subscript) -> None:
        index = node.slice
        for part in index.elts if isinstance(index, ast.Tuple) else [index]:
            if isinstance(part, ast.Slice):
                for border in (part.lower, part.upper):
                    if border is not None and not _is_text(border):
                        self._add("border", border, _one_more(self._text(border)))

    def _of_call(self, node: ast.Call) -> None:
        name = _called(node)
        subject: ast.expr | None = node.args[0] if node.args else None
        dims, here = node.args[1:2], self._span(node.func)
        if isinstance(node.func, ast.Attribute):
            here = here[1] - len(name), here[1]
            if self._text(node.func.value) not in MODULES:
                subject, dims = node.func.value, node.args[:1]
        if name in OTHER_NAMES:
            self._add("reduction", here, OTHER_NAMES[name])
        if name in WITHOUT and subject is not None:
            self._add("call lost", node, _wrapped(self._text(subject)))
        if name == "range" and not _is_text(node.args[0]):
            for argument in node.args[:2]:
                self._add("border", argument, _one_more(self._text(argument)))
        if name in ALONG:
            dims += [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
            for dim in dims:
                if self._text(dim) in ("-1", "0", "1", "2"):
                    self._add("axis", dim, {"-1": "0", "0": "-1", "1": "0", "2": "1"}[self._text(dim)])
        if name == "where" and len(node.args) == 3:
            first, second = (self._text(one) for one in node.args[1:])
            self._add(
                "mask", (self._span(node.args[1])[0], self._span(node.args[2])[1]), f"{second}, {first}"
            )
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool):
                if keyword.arg not in SAID:
                    self._add("flag", keyword.value, str(not keyword.value.value))
            elif keyword.arg in ("alpha", "value", "eps", "bias", "scale", "beta", "attn_mask", "initial"):
                start, end = self._span(keyword)
                before = self.source[:start].rstrip()
                if before.endswith(b","):
                    self._add("factor lost", (len(before) - 1, end), "")

    def _of_expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            name = _called(node.value)
            if (name.endswith("_") and not name.startswith("__")) or "reduce" in name or "broadcast" in name:
                self._add("step lost", node, "pass")

    def _of_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, float):
            self._add("factor", node, repr(2 * node.value if node.value else 1.0))
        if node.value in ("sum", "max", "avg", "mean") and isinstance(node.value, str):
            self._add("reduction", node, '"max"' if node.value == "sum" else '"sum"')

    def _of_return(self, node: ast.Return) -> None:
        if self.within[-1:] == ["backward"] and node.value is not None:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for part in parts:
                if not isinstance(part, ast.Constant | ast.Starred):
                    self._add("gradient", part, "None")
                    if isinstance(part, ast.Name):
                        self._add("gradient", part, f"{part.id} * 0")


def _wrapped(text: str) -> str:
    return f"({text})" if any(mark in text for mark in " \n") else text


def _one_more(text: str) -> str:
    return str(int(text) + 1) if text.isdigit() else f"{text} + 1"


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_text(node: ast.AST) -> bool:
    """Return whether an operand is a text, a path or a type, by its name."""
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str)):
            return True
        name = getattr(one, "attr", getattr(one, "id", ""))
        if any(part in str(name).lower() for part in TEXTS):
            return True
    return False


def _is_silent(node: ast.AST) -> bool:
    """Return whether nothing below a node computes a number."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.arguments):
        return True
    if isinstance(node, ast.Call):
        return _called(node) in SILENT
    if isinstance(node, ast.If):
        # A branch that only refuses is a check of arguments.
        return isinstance(node.body[0], ast.Raise) or "TYPE_CHECKING" in ast.dump(node.test)
    if isinstance(node, ast.FunctionDef):
        return node.name.lstrip("_").startswith(UNCOUNTED)
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in ("str", "TypeAlias")


def changes(path: Path) -> list[Change]:
    """All changes of a file."""
    source = path.read_text()
    places = _Places(source)
    places.visit(ast.parse(source))
    return places.changes


def _as_lines(source: str, change: Change) -> tuple[str, str]:
    """Whole lines before and after the change, enough of them to be unique in the file."""
    text = source.encode()
    first = text.rfind(b"\n", 0, change.first) + 1
    end = text.find(b"\n", change.end) + 1 or len(text)
    while text.count(text[first:end]) > 1:
        first = text.rfind(b"\n", 0, first - 1) + 1
    new = text[first : change.first] + change.new.encode() + text[change.end : end]
    return text[first:end].decode(), new.decode()


def _short(text: str, most: int = 44) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


def _name(file: str, source: str, change: Change) -> str:
    old = _short(source.encode()[change.first : change.end].decode())
    place = f"{file.removesuffix('.py')} {change.where}".rstrip()
    return f"{place}: {change.kind}: {_short(change.new) or 'nothing'} for {old}"


def drawn(seed: int, runtime: Path = ROOT / "runtime") -> Iterator[dict[str, str]]:
    """Faults in random order, at most one in a statement.

    All kinds of changes of a file are equally likely. A file with four times as many places is drawn twice as
    often.
    """
    lot = random.Random(seed)
    files = sorted({path for pattern in NUMERICS for path in runtime.glob(pattern)})
    left: dict[Path, dict[str, list[Change]]] = {}
    named: Counter[str] = Counter()
    for path in files:
        if path.relative_to(runtime).as_posix() in NO_NUMERICS:
            continue
        kinds: defaultdict[str, list[Change]] = defaultdict(list)
        for one in changes(path):
            kinds[one.kind].append(one)
        if kinds:
            left[path] = dict(kinds)
    while left:
        weights = [sum(map(len, kinds.values())) ** 0.5 for kinds in left.values()]
        path = lot.choices(list(left), weights)[0]
        kinds_left = left[path]
        change = lot.choice(kinds_left[lot.choice(sorted(kinds_left))])
        for kind, found in list(kinds_left.items()):
            kinds_left[kind] = [one for one in found if one.line != change.line]
            if not kinds_left[kind]:
                del kinds_left[kind]
        if not kinds_left:
            del left[path]
        source, file = path.read_text(), path.relative_to(runtime).as_posix()
        old, new = _as_lines(source, change)
        name = _name(file, source, change)
        named[name] += 1
        name += f", {named[name]}" if named[name] > 1 else ""
        yield {"name": name, "file": file, "old": old, "new": new}


@cache
def _imports(path: Path) -> frozenset[str]:
    """Modules of `runtime` and `tests.support` that a file names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


@cache
def _written() -> list[Fault]:
    return read_faults()


def likely_tests(file: str, root: Path = ROOT) -> list[str]:
    """Test files that may notice a fault of a file, the likeliest first.

    They are tests that found hand-written faults of the file, tests that import it, and tests whose ranks
    import it.
    """
    module = "runtime." + file.removesuffix(".py").replace("/", ".")
    score: Counter[str] = Counter()
    for fault in _written():
        if fault.file == file:
            for place, words in enumerate(fault.tests):
                score[words.split()[0].partition("::")[0]] += 4 - min(place, 3)
    for path in sorted((root / "tests/runtime").glob("test_*.py")):
        name = path.relative_to(root).as_posix()
        score[name] += 6 * (module in _imports(path))
        helpers = [root / f"{one.replace('.', '/')}.py" for one in _imports(path) if one.startswith("tests.")]
        score[name] += 3 * any(module in _imports(one) for one in helpers if one.is_file())
        score[name] += 5 * (Path(file).stem.removesuffix("s") in path.stem)
    score.update(dict.fromkeys(GENERAL, 1))
    return [name for name, points in score.most_common() if points]


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes code as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)

app = typer.Typer(add_completion=False)


@app.command()
def main(
    seed: Annotated[int, typer.Option(help="The draw.")],
    target: Annotated[Path, typer.Option("--output", "-o", help="The list to write.")],
    count: Annotated[int, typer.Option(help="How many faults.")] = 60,
    most_tests: Annotated[int, typer.Option(help="How many test files each one has.")] = 8,
) -> None:
    """Draw a list of faults for `planted_faults --faults LIST`."""
    left_out = {*yaml.safe_load(EQUAL.read_text()), *(fault.name for fault in _written())}
    entries: list[dict[str, object]] = []
    for one in drawn(seed):
        if one["name"] not in left_out:
            entries.append({**one, "tests": likely_tests(one["file"])[:most_tests]})
        if len(entries) == count:
            break
    target.write_text(yaml.dump(entries, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110))


if __name__ == "__main__":
    run(app, "benchmarks.drawn_faults")
