"""Imports go one way: between the packages, between the folders of each, and in no circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from tests.support import ROOT

PACKAGES = ("costmodels", "planner", "runtime", "cli")
"""Each may import from those before it."""

COMMAND_LINE = {"planner.__main__": "cli"}
"""Modules that belong to another package than the one that they lie in."""

ORDER = {
    "costmodels": (
        *(
            "errors",
            "dataclass",
            "exports",
            "files",
            "paths",
            "cache_files",
            "spelling",
            "pytorch",
            "spec",
            "catalogue",
            "layers",
            "ranks",
            "memory",
            "network",
        ),
        *("time", "rank_costs", "step_times", "pipeline_times", "pricing", "order", "timeline"),
        "calibration",
    ),
    "planner": (
        *(
            "processes",
            "inputs",
            "objective",
            "preference",
            "budget",
            "plan_rows",
            "plan",
            "history",
            "pipeline_ranks",
            "space",
            "problem",
            "solve",
            "ranking",
        ),
        *("proposals", "advice", "api", "world_sizes", "explanation", "options", "formats", "megatron_plan"),
        *("catalogues", "scripts", "service", "report", "web"),
    ),
    "planner.formats": (
        *("shell", "facts", "python", "writing"),
        *(
            "hugging_face",
            "megatron",
            "on_megatron",
            "nemo",
            "torchtitan",
            "primus",
            "mindformers",
            "nanotron",
        ),
    ),
    "runtime": (
        *(
            "logs",
            "processes",
            "world",
            "faults",
            "data",
            "settings",
            "model",
            "parallel",
            "optimizers",
            "train",
            "profiling",
        ),
        *("checkpoint", "huggingface", "preflight", "job", "launch", "calibrate", "dryrun", "generation"),
    ),
}
"""Folders of a package, and modules that lie beside them: each may import from those before it.

A module that is not named here lies above all folders.
"""


def folder_of(package: str) -> Path:
    """The folder of a package's files."""
    return ROOT.joinpath(*package.split("."))


def modules(package: str) -> dict[str, Path]:
    """Files of a package by the names of their modules."""
    files = folder_of(package).rglob("*.py")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


@cache
def imported(file: Path) -> tuple[str, ...]:
    """Modules and names that a file imports, wherever in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_from_those_below_them(package: str) -> None:
    wrong = []
    for module, file in modules(package).items():
        above = PACKAGES[PACKAGES.index(COMMAND_LINE.get(module, package)) + 1 :]
        wrong += [f"{module} imports {name}" for name in imported(file) if name.partition(".")[0] in above]
    assert not wrong


@pytest.mark.parametrize("package", ORDER)
def test_folders_import_from_those_below_them(package: str) -> None:
    order = ORDER[package]
    folders = {path.parent.name for path in folder_of(package).glob("*/__init__.py")}
    beside = {path.stem for path in folder_of(package).glob("*.py")}
    depth = len(package.split("."))
    assert folders <= set(order) <= folders | beside
    wrong = []
    for module, file in modules(package).items():
        folder = module.split(".")[depth]
        if folder not in order:
            continue
        above = order[order.index(folder) + 1 :]
        wrong += [
            f"{module} imports {name}"
            for name in imported(file)
            if name.startswith(f"{package}.") and name.split(".")[depth] in above
        ]
    assert not wrong


@pytest.mark.parametrize("package", ORDER)
def test_no_module_imports_itself_by_others(package: str) -> None:
    known = {name.removesuffix(".__init__"): file for name, file in modules(package).items()}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, file in known.items():
        for name in imported(file):
            target = name if name in known else name.rpartition(".")[0]
            if target in known and target != module:
                graph.add_edge(module, target)
    assert not list(nx.simple_cycles(graph))


@pytest.mark.parametrize("package", ORDER)
def test_the_page_of_the_architecture_shows_this_table(package: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, section = page.split(f"### `{package}`\n")
    rows = re.findall(r"^\| `(\w+)` \|", section.partition("\n##")[0], re.MULTILINE)
    assert tuple(rows) == ORDER[package]


def test_what_a_user_installs_is_what_the_commands_reach() -> None:
    """Programs for developers, such as fits of the catalogue's constants, lie beside the benchmarks."""
    known = {
        name.removesuffix(".__init__"): file
        for package in PACKAGES
        for name, file in modules(package).items()
    }
    reached: set[str] = set()
    waiting = [name for name in known if not name.startswith("costmodels.")]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        for name in imported(known[module]):
            parts = name.split(".")
            waiting += [
                prefix for end in range(1, len(parts) + 1) if (prefix := ".".join(parts[:end])) in known
            ]
    assert known.keys() == reached


RENAMED = ("options", "preflight", "targets", "trials")
"""Names that several modules had at once; each belongs to one module or package at most."""


@pytest.mark.parametrize("name", RENAMED)
def test_one_module_of_a_name(name: str) -> None:
    files = [file for package in PACKAGES for file in folder_of(package).rglob("*.py")]
    found = {file for file in files if file.stem == name} | {
        file.parent for file in files if file.name == "__init__.py" and file.parent.name == name
    }
    assert len(found) == 1
