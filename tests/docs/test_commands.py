"""Commands that the pages show can be typed, and those that answer at once do."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import make_app
from cli.main import COMMANDS
from tests.support import ROOT
from tests.support.commands import Command, told
from tests.support.guides import guide
from tests.support.hub import CONFIG, cache_model
from tests.support.pages import PAGES, blocks

AT_ONCE = ("suggest", "explain", "models", "devices", "engines")
"""Commands that neither trace nor train, of which those that need no file are run."""

OWN_FILES = re.compile(r"[\w./-]+\.(json|ya?ml|csv|toml|sh|txt)$")

TESTED_ELSEWHERE = ROOT / "docs" / "how-to"
"""Pages whose commands run on what they add (`test_recipes`)."""


def lines(page: Path) -> Iterator[str]:
    """Commands that a page shows after its prompts, continued lines joined."""
    for block in blocks(page):
        if block.language in ("console", "text"):
            text = block.text.replace("\\\n", " ")
            yield from (line[2:] for line in text.splitlines() if line.startswith("$ "))


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of each `planner` that a page types, also behind launchers and `&&`."""
    for line in lines(page):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        parts: list[list[str]] = [[]]
        for word in lexer:
            if re.fullmatch(r"[&|;<>]+", word):
                parts.append([])
            else:
                parts[-1].append(word)
        for part in parts:
            if "planner" in part:
                yield part[part.index("planner") + 1 :]


SHOWN = [
    pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:60]}")
    for page in PAGES
    for words in commands(page)
]

ANSWERED = [
    pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:60]}")
    for page in PAGES
    if not page.is_relative_to(TESTED_ELSEWHERE)
    for words in commands(page)
    if words[0] in AT_ONCE and not any(OWN_FILES.search(word) for word in words[1:] if "save" not in word)
]


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_of_a_page_can_be_typed(words: list[str]) -> None:
    """The flags of a command exist, and take what they are given."""
    command: Any = typer.main.get_command(make_app(COMMANDS, words))
    rest, name = words, "planner"
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, shlex.join(words)
        name, command, rest = rest[0], command.commands[rest[0]], rest[1:]
    command.make_context(name, list(rest))


@pytest.mark.slow
@pytest.mark.parametrize("words", ANSWERED)
def test_a_command_that_answers_at_once_does(
    words: list[str], planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cache_model(tmp_path / "hub", "Qwen/Qwen3-8B", {"config.json": json.dumps(CONFIG)})
    code, out, err = planner_command(*words)
    assert code == 0 and "error" not in told(err), shlex.join(words)
    assert out.count("\n") > 3


JUDGED = [
    pytest.param(block.text, id=block.text.splitlines()[0][2:])
    for block in blocks(ROOT / "docs" / "guides.md")
    if block.text.startswith("$ planner check ")
]
"""Guides, and what the page says that the command prints."""


def before_the_estimates(text: str) -> list[str]:
    """The words of an answer down to its estimates, numbers left out, which move when constants do."""
    head = text.partition("\nas it is:")[0]
    return re.sub(r"\d[\d,.]*", "0", head).split()


@pytest.mark.slow
@pytest.mark.parametrize("shown", JUDGED)
def test_what_is_said_of_a_guide_is_what_is_printed(
    shown: str, planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, _, answer = shown.partition("\n")
    words = shlex.split(line)[2:]
    monkeypatch.chdir(guide(words[1]).parent)
    _, out, err = planner_command(*words)
    assert before_the_estimates(out + told(err)) == before_the_estimates(answer)


PROGRAMS = [
    pytest.param(block.text, id=f"{page.stem}: {block.text.splitlines()[-1][:50]}")
    for page in PAGES
    if not page.is_relative_to(TESTED_ELSEWHERE)
    for block in blocks(page)
    if block.language == "python"
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_a_page_runs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "page", "exec"), {})
    assert capsys.readouterr().out


def test_enough_is_tried() -> None:
    assert len(SHOWN) > 80 and len(ANSWERED) > 8 and len(JUDGED) > 5 and len(PROGRAMS) > 2
