"""Instructions to contributors against the settings of the tools."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import yaml

from tests.support import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_tiers_are_the_markers_of_pytest() -> None:
    markers = set(re.findall(r'^    "(\w+): ', PROJECT, re.MULTILINE))
    assert set(re.findall(r"`pytest -m (\w+)`", CONTRIBUTING)) == markers


def test_the_least_version_of_whatever_is_needed_is_tested() -> None:
    """Required packages, fp8's and pytest have a least version; tools of development have none."""
    (needed,) = re.findall(r"^dependencies = \[$(.+?)^\]$", PROJECT, re.MULTILINE | re.DOTALL)
    found = runpy.run_path(str(ROOT / ".ci" / "least.py"))["least_versions"](PROJECT)
    names = re.findall(r'"([\w-]+)', needed)
    assert len(names) == 11
    assert {*names, "torchao", "pytest", "hypothesis"} <= {*found}
    assert {"ruff", "mypy", "setuptools"}.isdisjoint(found)
    for name, version in found.items():
        assert f'"{name}>={version}"' in PROJECT


def test_the_changelog_has_the_version_or_what_is_to_become_it() -> None:
    (version,) = re.findall(r'^version = "(.+)"', PROJECT, re.MULTILINE)
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert not released or released[0] == version
    assert headings[0] == "Unreleased"


def test_hooks_check_what_continuous_integration_checks() -> None:
    """Hooks run the tools of the environment, whose versions are pinned in one place."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    checks = re.findall(r"^\.venv/bin/(ruff \w+|mypy)\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert [re.match(r"ruff \w+|mypy", hook["entry"])[0] for hook in hooks] == checks  # type: ignore[index]
    for name in {check.split()[0] for check in checks}:
        assert re.search(rf'"{name}==[\d.]+"', PROJECT)


def test_commands_of_a_release_are_known() -> None:
    (shown,) = re.findall(r"release/bin/planner launch (.+)", CONTRIBUTING)
    command = [sys.executable, "-m", "planner", "launch", *shown.split(), "--print-command"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
