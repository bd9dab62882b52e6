"""Words that a machine can check: what docstrings open with, long sentences, and words with a better one."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.pages import PAGES, sentences

CODE = ("benchmarks", "cli", "costmodels", "planner", "runtime", "tests")

RULES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))

CLAUSE = re.compile(rf"({'|'.join(RULES['clauses'])})\b")

NO_SUBJECT = re.compile(rf"({'|'.join(RULES['openings'])})\b")

AVOIDED = {re.compile(rf"\b(?:{rule['not']})\b", re.IGNORECASE): rule["say"] for rule in RULES["avoided"]}

HISTORY = ROOT / "CHANGELOG.md"
"""The page that says what was called what at its time."""

HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, those behind assignments included."""
    for node in ast.walk(tree):
        if not isinstance(node, HOLDERS):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield node.body[0].lineno, text
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                value = after.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield after.lineno, value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each block of comments, and of each comment behind code."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            behind_code = bool(token.line[: token.start[1]].strip())
            if behind_code or token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("# ")
            last = -1 if behind_code else token.start[0]


def texts(package: str) -> Iterator[tuple[Path, str]]:
    """The Python files and the pages of a package."""
    for file in sorted((ROOT / package).rglob("*")):
        if file.suffix in (".py", ".md", ".html") and file.is_file():
            yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


def one_line(file: Path, words: str) -> str:
    """A text whose line breaks are blanks, without what a page quotes."""
    text = re.sub(r"\s+(?:# )?", " ", words)
    return re.sub(r'"[^"]*"', "", text) if file.suffix == ".md" else text


@pytest.mark.parametrize("package", CODE)
def test_docstrings_open_with_a_subject_and_comments_with_no_clause(package: str) -> None:
    found = [
        f"{file}:{line}: {' '.join(text.split())[:60]}"
        for file, words in texts(package)
        if file.suffix == ".py"
        for line, text, openings in (
            *((*found, (CLAUSE, NO_SUBJECT)) for found in docstrings(ast.parse(words))),
            *((*found, (CLAUSE,)) for found in comments(words)),
        )
        if any(opening.match(text.strip()) for opening in openings)
    ]
    assert not found, "\n".join(found)


def test_a_block_of_comments_has_one_opening() -> None:
    text = "# A block\n# What it is.\nx = 1  # Behind code.\n# Another.\n"
    assert list(comments(text)) == [(1, "A block"), (3, "Behind code."), (4, "Another.")]


@pytest.mark.parametrize("folder", [*CODE, "docs", "examples"])
def test_texts_avoid_words_with_better_ones(folder: str) -> None:
    files = dict(texts(folder))
    if folder == "docs":
        files |= {
            page.relative_to(ROOT): page.read_text(encoding="utf-8") for page in PAGES if page != HISTORY
        }
    found = [
        f"{file}: {match[0]!r}: write {better!r}"
        for file, words in files.items()
        for pattern, better in AVOIDED.items()
        for match in pattern.finditer(one_line(file, words))
    ]
    assert not found, "\n".join(found)


def test_sentences_of_the_documentation_are_short() -> None:
    most = RULES["words_of_a_sentence"]
    found = [
        f"{page.relative_to(ROOT)}: {words} words: {sentence[:80]}"
        for page in PAGES
        if page != HISTORY
        for words, sentence in sentences(page.read_text(encoding="utf-8"))
        if words > most
    ]
    assert not found, "\n".join([f"{len(found)} sentences have more than {most} words:", *found])


def test_sentences_are_counted_as_they_are_read() -> None:
    text = (
        "One two three. Four `five six` [seven](x.md).\n\n| a table | is none |\n\n- An item: it has parts.\n"
    )
    assert [count for count, _ in sentences(text)] == [3, 3, 5]
