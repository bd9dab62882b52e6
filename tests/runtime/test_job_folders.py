"""The folders of a job are looked at before PyTorch is loaded, and two runs never share one by mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from costmodels.errors import InputError
from runtime.checkpoint import MANIFEST, iteration_folder
from runtime.job.job_folders import check_save
from runtime.processes.start_variables import ELASTIC_VARIABLE, RESTARTS_VARIABLES
from runtime.settings.training_options import OutputOptions
from tests.support import ROOT


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoints of two iterations."""
    for name in (ELASTIC_VARIABLE, *RESTARTS_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for iteration in (4, 8):
        folder = iteration_folder(tmp_path / "used", iteration)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
    return tmp_path / "used"


def test_a_run_that_begins_anew_needs_a_fresh_folder(used: Path, tmp_path: Path) -> None:
    for load in (None, str(tmp_path / "base")):
        with pytest.raises(InputError) as refusal:
            check_save(OutputOptions(save=str(used), load=load))
        assert "used: holds checkpoints of an earlier run (the newest: iteration 8)" in str(refusal.value)
        assert f"--load {used}, or give a fresh folder" in str(refusal.value)
    (tmp_path / "fresh").mkdir()
    check_save(OutputOptions(save=str(tmp_path / "fresh")))
    check_save(OutputOptions(save=str(tmp_path / "none")))


@pytest.mark.parametrize("variable", [ELASTIC_VARIABLE, *RESTARTS_VARIABLES])
def test_a_run_that_goes_on_has_the_folder_it_had(
    used: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    check_save(OutputOptions(save=str(used), load=f"{used}/../used"))
    monkeypatch.setenv(variable, "1")
    check_save(OutputOptions(save=str(used)))


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "--input", "none", "--output", "out"),
        ("generate", "--load", "none", "--prompt", "hi"),
        ("launch", "--model", "gpt2-nano", "--device", "cpu", "--world-size", "1", "--load", "hf"),
    ],
    ids=lambda words: words[0],
)
def test_a_wrong_folder_is_refused_without_pytorch(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    script = "import sys; from cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.splitlines()[-1].startswith("planner: error: ") and "Traceback" not in done.stderr
