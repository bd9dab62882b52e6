"""Names on the pages exist, and shown commands can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.commands import Command
from tests.support.pages import PAGES, changes, new_files, planner_commands, prose

TOPS = ("benchmarks", "cli", "costmodels", "docs", "planner", "runtime", "tests", ".ci")

HOW_TO = ROOT / "docs" / "how-to"

DATA = ("device", "engine", "model")
"""Entries that one file adds, without code."""

QUICK = ("suggest", "explain", "models", "devices", "engines")
"""Commands that neither trace nor train."""


def named(page: Path) -> Iterator[str]:
    """Files and folders of the repository that a page names in its prose, as `code`."""
    for text in re.findall(r"`([^`\n]+)`", prose(page)):
        if "/" in text and text.split("/")[0] in TOPS and not re.search(r"[\s*<]", text):
            yield text


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    written = new_files(page)
    assert [name for name in named(page) if name not in written and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if ":" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_that_a_page_runs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"-m\s+((?:benchmarks|runtime|tests)\.[\w.]+)", text))
    paths = {name: ROOT / name.replace(".", "/") for name in modules}
    missing = [
        name
        for name, path in paths.items()
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ]
    assert missing == []


@pytest.mark.parametrize("page", sorted(HOW_TO.glob("*.md")), ids=name_of)
def test_a_page_names_the_files_that_it_changes(page: Path) -> None:
    """The prose names them, so that a reader knows beforehand what there is to do."""
    touched = {change.file for change in changes(page)} | {name for name in new_files(page) if "/" in name}
    assert touched <= set(named(page))


@pytest.mark.parametrize("page", sorted(HOW_TO.glob("*.md")), ids=name_of)
def test_changes_that_a_page_shows_fit_the_code(page: Path) -> None:
    """Changes are carried out, and what they add is run, in `test_recipes`."""
    for change in changes(page):
        assert (ROOT / change.file).read_text(encoding="utf-8").count(change.before) == 1, change


@pytest.mark.parametrize("page", [HOW_TO / f"{name}.md" for name in DATA], ids=name_of)
def test_what_is_data_is_added_by_one_file(
    page: Path, tmp_path: Path, planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, text),) = new_files(page).items()
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    commands = [command for command in planner_commands(page) if command[0] in QUICK]
    assert any(name in command for command in commands)
    for command in commands:
        code, out, err = planner_command(*command)
        assert (code, err) == (0, ""), shlex.join(command)
        assert Path(name).stem in out
    assert not changes(page)
