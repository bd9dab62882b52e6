"""Examples of docstrings print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import planner
from tests.support import ROOT

PACKAGES = ("cli", "costmodels", "planner", "runtime")

SHOWN = ("evaluate", "explain", "plan_figures", "search", "sizes", "suggest", "Plan", "SearchResult")
"""Functions and classes that a notebook asks for."""

NEEDED = {"planner.ranking.result": ["pandas"], "planner.report.figures": ["plotly"]}
"""Packages that examples of a module need besides."""


def is_run(line: str) -> bool:
    """Return whether a line of code is an example that can be tried here."""
    return line.lstrip().startswith(">>> ") and "+SKIP" not in line


def modules() -> list[str]:
    """The modules that have examples."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    with_some = [file for file, text in texts.items() if any(map(is_run, text.splitlines()))]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in with_some]


@pytest.mark.slow
@pytest.mark.parametrize("name", modules())
def test_examples_print_what_they_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    for needed in NEEDED.get(name, ()):
        pytest.importorskip(needed)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_notebook_asks_for_has_an_example(name: str) -> None:
    assert any(map(is_run, str(getattr(planner, name).__doc__).splitlines()))
