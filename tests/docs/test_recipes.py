"""Recipes of the pages: their commands run on a copy of the code with their changes."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pages import changes, copied_code, planner_commands, write_changes

pytestmark = pytest.mark.ranks

HOW_TO = ROOT / "docs" / "how-to"

DATA, CODE = ("device", "engine", "model"), ("optimizer", "schedule", "block-feature")


def run(command: list[str], code: Path, folder: Path) -> str:
    """The output of a command, run in `folder` by the packages in `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "planner", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"planner {shlex.join(command)}: {done.stderr}"
    return done.stdout


def check_trace(out: str) -> None:
    """The memory that is planned (its upper end, of a tiny model) is near what is traced."""
    for rank in json.loads(out)["ranks"]:
        planned, traced = rank["estimate"]["bytes"], rank["peak"]["bytes"]
        assert math.isclose(planned, traced, rel_tol=0.05, abs_tol=4 * 2**20)


def check_training(folder: Path) -> None:
    """The losses fall."""
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, after = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert after < before


@pytest.mark.parametrize("name", DATA)
def test_what_is_data_needs_no_code(name: str, tmp_path: Path) -> None:
    """Commands that answer at once are typed in `test_pages`."""
    page = HOW_TO / f"{name}.md"
    write_changes(page, tmp_path)
    for command in planner_commands(page):
        if command[0] in ("dryrun", "launch"):
            run(command, ROOT, tmp_path)
        if command[0] == "launch":
            check_training(tmp_path)


@pytest.mark.parametrize("name", CODE)
def test_code_is_added_by_the_files_of_its_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, code = HOW_TO / f"{name}.md", copied_code(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_changes(page, code)
    commands = planner_commands(page)
    assert {command[0] for command in commands} >= {"suggest", "dryrun", "launch"}
    for command in commands:
        as_json = ["--json"] if command[0] == "dryrun" else []
        out = run([*command, *as_json], code, code)
        if command[0] == "dryrun":
            check_trace(out)
        if command[0] == "launch":
            check_training(code)


def test_features_of_blocks_take_at_most_five_files() -> None:
    page = HOW_TO / "block-feature.md"
    assert len({change.file for change in changes(page)}) <= 5
