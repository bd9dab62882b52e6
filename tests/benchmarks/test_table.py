"""The table of benchmarks names every command and every result."""

from __future__ import annotations

import re

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


def test_every_result_is_linked() -> None:
    links = set(re.findall(r"\(results/([\w.]+)\)", (FOLDER / "README.md").read_text(encoding="utf-8")))
    assert links == {file.name for file in (FOLDER / "results").iterdir()}
