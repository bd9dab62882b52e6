"""The table of benchmarks names every command and every result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDER = ROOT / "benchmarks"

FOLDERS = (FOLDER, ROOT / "tests" / "fuzz")


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in FOLDERS
        for path in (*folder.glob("*.py"), *folder.glob("*/__main__.py"))
        if "__main__" in path.name or 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE) + re.findall(r" Starts `(\w+)`\.", page)
    named = {row if row.startswith("tests.") else f"benchmarks.{row}" for row in rows}
    assert len(rows) == len(named)
    assert named == commands


def test_every_result_is_linked_with_its_date() -> None:
    pattern = r"\[([\d-]+)\]\(results/([\w.]+)\)"
    links = {
        name: date for date, name in re.findall(pattern, (FOLDER / "README.md").read_text(encoding="utf-8"))
    }
    files = {file.name: file.read_text(encoding="utf-8") for file in (FOLDER / "results").iterdir()}
    assert links.keys() == files.keys()
    assert [name for name, date in links.items() if date not in files[name].partition("\n")[0]] == []


@pytest.mark.parametrize("file", sorted((FOLDER / "results").iterdir()), ids=lambda file: file.stem)
def test_a_result_says_its_command_and_commit(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert re.search(r"\bcommit [0-9a-f]{7,12}\b", text.partition("\n")[0])
    assert re.search(r"python -m (benchmarks|tests)\.\w+", text)
    log = re.findall(r"^.*(?:\biteration +\d+/|\[\d{4}-\d\d-\d\d [\d:.]+\]|Traceback).*$", text, re.MULTILINE)
    assert not log, "a table, not the log of a run"
