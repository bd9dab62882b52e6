"""Words that a machine can check: docstrings open with a subject, and texts avoid some phrases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

CODE = ("benchmarks", "cli", "costmodels", "planner", "runtime")

NO_SUBJECT = re.compile(r"(Of|Those|The same|It|Its|They|Them|That|Ones|Such|Whose|As|With|And|Or)\b")
"""Openings of a sentence whose subject stands elsewhere."""

AVOIDED = {
    "held back by": "bottleneck",
    "tell apart from the best": "within the estimate's error",
    "with a factor for each": "one scale per",
    "all else chosen anew": "re-optimise the rest",
    "are heeded": "are honoured",
    "add up in squares": "combined as root-sum-square",
}
"""Phrases that readers stumble over, and what is said instead."""

RECORDS = (ast.Module, ast.ClassDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, those behind assignments included."""
    for node in ast.walk(tree):
        if isinstance(node, (*RECORDS, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text
        if isinstance(node, RECORDS):
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    value = after.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield after.lineno, value.value


def texts(package: str) -> Iterator[tuple[Path, str]]:
    """The Python files of a package."""
    for file in sorted((ROOT / package).rglob("*.py")):
        yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", CODE)
def test_docstrings_open_with_a_subject(package: str) -> None:
    found = [
        f"{file}:{line}: {' '.join(text.split())[:60]}"
        for file, words in texts(package)
        for line, text in docstrings(ast.parse(words))
        if NO_SUBJECT.match(text.strip())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", [*CODE, "docs"])
def test_texts_avoid_phrases_with_better_ones(folder: str) -> None:
    files = dict(texts(folder)) if folder != "docs" else {}
    files |= {
        file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in (ROOT / folder).rglob("*.md")
    }
    found = [
        f"{file}: {phrase!r}: write {better!r}"
        for file, words in files.items()
        for phrase, better in AVOIDED.items()
        if phrase in words
    ]
    assert not found, "\n".join(found)
