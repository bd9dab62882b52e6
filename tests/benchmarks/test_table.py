"""The table of benchmarks names every command and every result."""

from __future__ import annotations

import re

from tests.support import ROOT

FOLDER = ROOT / "benchmarks"

PARTS = {"data_parallel_methods", "gpu_case", "memory_gpu_case", "startup_processes", "fuzz_hostile"}
"""Modules that a benchmark starts in processes of their own."""


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py")]
    commands = {
        file.parent.name if file.name == "__main__.py" else file.stem
        for file in files
        if "__main__" in file.name or 'if __name__ == "__main__"' in file.read_text(encoding="utf-8")
    }
    rows = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == commands - PARTS


def test_every_result_is_linked() -> None:
    links = set(re.findall(r"\(results/([\w.]+)\)", (FOLDER / "README.md").read_text(encoding="utf-8")))
    assert links == {file.name for file in (FOLDER / "results").iterdir()}
