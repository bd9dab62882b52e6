"""The table of benchmarks names every command and every result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDER = ROOT / "benchmarks"

FOLDERS = (FOLDER, ROOT / "tests" / "fuzz")

PARTS = {"data_parallel_methods", "gpu_case", "memory_gpu_case", "startup_processes"}
"""Modules that a benchmark starts in processes of their own."""


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in FOLDERS
        for path in (*folder.glob("*.py"), *folder.glob("*/__main__.py"))
        if "__main__" in path.name or 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    rows = re.findall(r"^\| `([\w.]+)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {row if row.startswith("tests.") else f"benchmarks.{row}" for row in rows}
    assert len(rows) == len(named)
    assert named == commands - {f"benchmarks.{part}" for part in PARTS}


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
