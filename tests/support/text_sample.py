"""A random sample of texts to read as a stranger: docstrings, help lines, and paragraphs of the pages.

python -m tests.support.text_sample --seed 7
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator

from tests.support import ROOT
from tests.support.pages import PAGES, prose

PACKAGES = ("benchmarks", "cli", "costmodels", "planner", "runtime")

SIZES = {"docstrings": 40, "help lines": 20, "paragraphs": 10}
"""Texts of each kind in a sample."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

FLAGS = ROOT / "docs" / "flags.md"

HISTORY = ROOT / "CHANGELOG.md"


def docstrings() -> Iterator[str]:
    """Docstrings of the packages with the line that each stands in, those of fields included."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                for line, what, text in _texts_of(node):
                    yield f"{file.relative_to(ROOT)}:{line} {what}\n{text}"


def _texts_of(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The lines, the names and the texts of the docstrings of a node and of its fields."""
    if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
        yield node.body[0].lineno, getattr(node, "name", "module"), text
    if isinstance(node, ast.Module | ast.ClassDef):
        for before, after in zip(node.body, node.body[1:], strict=False):
            value = after.value if isinstance(after, ast.Expr) else None
            if not isinstance(before, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Constant):
                continue
            if isinstance(value.value, str):
                named = before.target if isinstance(before, ast.AnnAssign) else before.targets[0]
                yield after.lineno, ast.unparse(named), value.value


def help_lines() -> Iterator[str]:
    """Lines of the page of flags, which says what `--help` says."""
    yield from re.findall(r"^\| (`.*) \| [^|]* \|$", FLAGS.read_text(encoding="utf-8"), re.MULTILINE)


def paragraphs() -> Iterator[str]:
    """Paragraphs and lists of the pages, without tables, headings and code."""
    for page in PAGES:
        if page not in (FLAGS, HISTORY):
            for text in re.split(r"\n{2,}", prose(page)):
                if text.strip() and not text.strip().startswith(("#", "|", "<", "!")):
                    yield f"{page.relative_to(ROOT)}\n{text.strip()}"


def sample(seed: int) -> dict[str, list[str]]:
    """The texts that a seed draws, by their kind."""
    draw = random.Random(seed)
    every = {"docstrings": docstrings(), "help lines": help_lines(), "paragraphs": paragraphs()}
    return {kind: draw.sample(list(texts), SIZES[kind]) for kind, texts in every.items()}


def main() -> None:
    """Print a sample."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True, help="number that the draw starts from")
    seed = parser.parse_args().seed
    for kind, texts in sample(seed).items():
        print(f"# {len(texts)} {kind}, seed {seed}\n\n" + "\n\n".join(texts) + "\n")


if __name__ == "__main__":
    main()
