"""Built packages install, and answer and train from any folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support import ROOT

pytest.importorskip("build", reason="packages are built with the extra dev")
pytest.importorskip("twine", reason="packages are checked with the extra dev")

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

(VERSION,) = re.findall(r'^version = "(.+)"', PROJECT, re.MULTILINE)

SOURCES = ("cli", "costmodels", "planner", "runtime", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


def run(*command: str | Path, folder: Path) -> str:
    """The output of a command, run in `folder` without the repository on its path."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    # With the setuptools of this environment, so that no index is asked.
    run(sys.executable, "-m", "build", "--no-isolation", source, folder=source)
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, which borrows from this one what the wheel depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (wheel,) = built.glob("*.whl")
    (packages,) = folder.glob("lib/python*/site-packages")
    installer = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*installer, "install", "--quiet", "--no-deps", wheel, folder=folder)
    # Behind its own packages.
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_what_is_built_passes_the_check_of_the_index(built: Path) -> None:
    names = sorted(file.name for file in built.iterdir())
    assert names == [
        f"llm_parallelism_planner-{VERSION}-py3-none-any.whl",
        f"llm_parallelism_planner-{VERSION}.tar.gz",
    ]
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), folder=built)


@pytest.mark.slow
def test_the_version_stands_in_one_place(installed: Path, tmp_path: Path) -> None:
    told = "from planner.version import version; import planner; print(version(), planner.__file__)"
    version, file = run(installed / "python", "-c", told, folder=tmp_path).split()
    assert version == VERSION and Path(file).is_relative_to(installed.parent)
    assert run(installed / "planner", "--version", folder=tmp_path).split()[-1] == VERSION


@pytest.mark.ranks
def test_an_installed_wheel_plans_and_trains(installed: Path, tmp_path: Path) -> None:
    """The wheel holds the files that it reads besides its modules (models, merges of a tokenizer)."""
    job = ("--model", "gpt2-nano", "--device", "cpu", "--world-size", "2", "--max-global-batch-size", "4")
    out = run(installed / "planner", "suggest", *job, "--save", "plan.json", folder=tmp_path)
    assert out.startswith("tp=")
    train = ("--plan", "plan.json", "--train-iters", "2", "--log-dir", "run")
    assert "predicted / measured" in run(installed / "planner", "launch", *train, folder=tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
