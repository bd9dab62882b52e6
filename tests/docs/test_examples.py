"""The examples run, in small, and say what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

EXAMPLES = ROOT / "examples"


def run(folder: Path, name: str, *words: str) -> str:
    """The standard output of an example, run in `folder`."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_told_of() -> None:
    told = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(file.name in told for file in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")])


@pytest.mark.slow
def test_a_scaling_study_draws_what_it_prints(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    out = run(tmp_path, "scaling_study.py", "llama2-7b", "8,16", "page.html")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["8", "16"]
    days = [float(row[1]) for row in rows]
    assert days[0] > days[1] > 0.45 * days[0]
    assert "plotly" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_offers_are_sorted_by_money(tmp_path: Path) -> None:
    out = run(tmp_path, "which_cluster.py", "gpt2-xl", "10B")
    money = [float(line.split()[0].replace(",", "")) for line in out.splitlines()[1:]]
    assert len(money) > 3 and money == sorted(money)


@pytest.mark.slow
def test_a_plan_for_ascend_becomes_flags_that_are_read_again(tmp_path: Path) -> None:
    import planner

    flags = run(tmp_path, "ascend_to_mindspeed.py", "qwen3-8b", "16")
    (tmp_path / "flags.sh").write_text(flags)
    assert "--tensor-model-parallel-size" in flags
    checked = planner.check(tmp_path / "flags.sh", world_size=16, device="ascend-910b", engine="mindspeed")
    assert checked.legal is True and checked.fits is True


@pytest.mark.slow
def test_the_jobs_of_the_guides_are_planned(tmp_path: Path) -> None:
    out = run(tmp_path, "guides.py")
    assert out.count("$ planner suggest") == out.count("\nstep ") == 5


@pytest.mark.ranks
def test_a_guides_job_trains_in_small(tmp_path: Path) -> None:
    assert "predicted / measured" in run(tmp_path, "guides.py", "pai-llmacc", "--train")


@pytest.mark.slow
def test_the_notebook_runs_and_its_outputs_are_of_the_kinds_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nbclient", "nbformat", "ipykernel", "pandas", "plotly"):
        pytest.importorskip(name)
    from tests.support.example_notebook import NOTEBOOK, executed

    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    shown = json.loads(NOTEBOOK.read_text(encoding="utf-8"))

    def kinds(book: dict[str, Any]) -> list[list[Any]]:
        return [
            [(output["output_type"], sorted(output.get("data", {}))) for output in cell["outputs"]]
            for cell in book["cells"]
            if cell["cell_type"] == "code"
        ]

    assert all(kinds(shown)) and kinds(executed(tmp_path)) == kinds(shown)
    assert (tmp_path / "report.html").is_file()
