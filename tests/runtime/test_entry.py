"""Modules that ranks run and import are this installation's, whatever lies in the user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from runtime import entry, import_path
from runtime.launch.torchrun import torchrun_command
from runtime.processes.pools import spawn_context
from runtime.processes.tether import tether
from tests.support import ROOT

NAMES = (
    *("planner", "cli", "costmodels", "runtime/__init__"),
    *(
        "torch",
        "numpy",
        "pydantic",
        "typing",
        "dataclasses",
        "json",
        "pickle",
        "random",
        "socket",
        "tempfile",
    ),
)


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files have the names of imported modules."""
    (tmp_path / "runtime").mkdir()
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}.py of the user')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_job_imports_nothing_from_where_it_is_started(crowded: Path) -> None:
    """A job runs from the process that ties it to its launcher, over torchrun, to its rank."""
    done = subprocess.run(
        tether(torchrun_command(1, ["--help"])),
        cwd=crowded,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: runtime.pretrain" in done.stdout and "of the user" not in done.stdout + done.stderr


@pytest.mark.filterwarnings("error")
def test_a_spawned_process_imports_nothing_from_where_it_is_started(crowded: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=spawn_context()) as pool:
        assert pool.submit(abs, -3).result() == 3
    assert Path.cwd() == crowded


def test_a_module_leaves_the_folder_in_which_it_is_typed(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "runtime.pretrain", "--plan", "plan.json"])
    assert import_path.runs_package("runtime") and not import_path.runs_package("planner")
    # Neither the source tree nor a place where the packages are installed besides.
    others = [folder for folder in sys.path if folder and not Path(folder, "costmodels").is_dir()]
    monkeypatch.setattr(sys, "path", [str(crowded), *others])
    import_path.leave_working_directory(ROOT)
    assert sys.path == others
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *others])
    import_path.leave_working_directory(ROOT)
    assert sys.path == [str(ROOT), *others]


def test_a_link_to_the_installation_is_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home folders may be links to another disk."""
    (tmp_path / "home").symlink_to(ROOT)
    # Neither the source tree nor a place where the packages are installed besides.
    others = [folder for folder in sys.path if folder and not Path(folder, "costmodels").is_dir()]
    monkeypatch.setattr(sys, "path", path := [str(tmp_path / "home"), *others])
    monkeypatch.chdir(tmp_path)
    import_path.leave_working_directory(ROOT)
    monkeypatch.setattr(sys, "argv", ["entry.py", "runtime.pretrain"])
    monkeypatch.setattr(entry, "run_module", lambda name, **_: None)
    entry.main()
    assert sys.path == path == [str(tmp_path / "home"), *others]


def test_a_file_that_comes_before_a_package_is_named(
    crowded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT.parent), str(crowded), str(ROOT)])
    with pytest.raises(SystemExit, match="2"):
        import_path.leave_working_directory(ROOT)
    assert capsys.readouterr().err == (
        f"runtime: error: {crowded / 'costmodels.py'} is in the way of the package costmodels in {ROOT}: "
        "rename it, or take its folder out of PYTHONPATH\n"
    )
