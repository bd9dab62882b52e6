"""Logs of ranks: a folder of each, lines of progress, and services that keep figures."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from costmodels.errors import InputError
from runtime.job.log_lines import mindformers_lines, progress_line
from runtime.logs import console
from runtime.logs import trackers as trackers_module
from runtime.logs.rank_log import RankLog
from runtime.logs.trackers import MlflowRun, Trackers, WandbRun, check_installed
from runtime.settings.training_options import OutputOptions
from tests.support.jobs import wait_until

STEP = {
    "iteration": 40,
    "loss": 3.0262,
    "learning_rate": 3e-4,
    "grad_norm": 2.5,
    "step_time_s": 2.0,
    "tflops_per_device": 1.5,
    "loss_scale": 1.0,
    "skipped_iterations": 0,
}

NOW = datetime(2026, 11, 23, 4, 5, 6, 78_000)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a rank's log changes in this process."""
    monkeypatch.setattr(console, "listener", None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    yield
    console.listener = None


def lines(path: Path) -> list[str]:
    return [re.sub(r"^\S+ \S+ ", "", line) for line in path.read_text().splitlines()]


def test_each_rank_has_its_own_files(
    tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RankLog(tmp_path, 3).open()
    console.say("saved checkpoint iter_10")
    console.progress("opening the data")
    console.say("warning: a disk is full", sys.stderr)
    console.note("for this rank alone")
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: None)
    error = ValueError("a broken sample")
    sys.excepthook(ValueError, error, None)
    info, wrong = tmp_path / "rank_3" / "info.log", tmp_path / "rank_3" / "error.log"
    assert lines(info) == [
        *("saved checkpoint iter_10", "runtime: opening the data ...", "warning: a disk is full"),
        *("for this rank alone", "ValueError: a broken sample"),
    ]
    assert lines(wrong) == ["warning: a disk is full", "ValueError: a broken sample"]
    out, err = capsys.readouterr()
    assert out == "saved checkpoint iter_10\n" and "for this rank alone" not in err


def test_a_folder_that_cannot_be_made_ends_nothing(
    tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_0").write_text("a file")
    RankLog(tmp_path, 0).open()
    console.say("on it goes")
    out, err = capsys.readouterr()
    assert out == "on it goes\n" and "the run goes on" in err


def test_progress_says_when_it_ends_and_how_it_compares() -> None:
    assert progress_line(STEP, 160, 1.6) == (
        "progress: 40 of 160 steps (25.0 %), ETA 0:04:00; 2.00 s a step, 1.25 x the predicted 1.60 s"
    )


def test_mindformers_line_is_read_by_its_tools() -> None:
    first, second = mindformers_lines(STEP, 160, 8, 4, NOW).splitlines()
    found = re.search(
        r"\{ Epoch:\[ *(\d+)/ *(\d+)\], step:\[ *(\d+)/ *(\d+)\], loss: *([\d.]+), per_step_time: (\d+)ms, "
        r"lr: ([\d.e-]+), overflow cond: (\w+), loss_scale: ([\d.]+), global_norm: \[([\d.]+)\], "
        r"train_throughput_per_npu: ([\d.]+)T$",
        first,
    )
    assert found is not None
    assert found.groups() == (
        "1",
        "1",
        "40",
        "160",
        "3.026",
        "2000",
        "0.0003",
        "False",
        "1.0",
        "2.5",
        "1.500",
    )
    assert re.search(r" 25\.0% \|█{12} {38}\| 1\.00000 samples/s/p  0:04:00 \}$", second)
    assert first.startswith("2026-11-23 04:05:06,078 - planner - INFO - ")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (OutputOptions(log_format="json"), "--log-format json: expected megatron or mindformers"),
        (OutputOptions(wandb_exp_name="a"), "--wandb-exp-name needs --wandb-project NAME"),
        (OutputOptions(mlflow_tracking_uri="a"), "--mlflow-tracking-uri needs --mlflow-experiment NAME"),
    ],
)
def test_flags_of_logs_that_make_no_sense_are_refused(options: OutputOptions, named: str) -> None:
    with pytest.raises(InputError) as refusal:
        options.check()
    assert named in str(refusal.value)


def test_a_service_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"--wandb-project needs the package wandb: pip install"):
        check_installed("wandb", "--wandb-project", "wandb")


def test_a_service_that_fails_is_told_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    class Broken:
        def log(self, figures: Mapping[str, float], iteration: int) -> None:
            raise OSError("no network")

        def close(self) -> None:
            raise AssertionError

    good = SimpleNamespace(log=lambda figures, iteration: seen.append(iteration), close=lambda: None)
    trackers = Trackers({"broken": Broken, "good": lambda: good})
    for iteration in (1, 2):
        trackers.log(STEP, iteration)
    trackers.close()
    assert seen == [1, 2]
    assert capsys.readouterr().err == (
        "warning: broken gets no more figures (OSError: no network); the run goes on\n"
    )


def test_a_service_that_does_not_answer_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that is not there, which mlflow asks for minutes, and one that then hangs."""
    answers = threading.Event()
    asked: list[int] = []

    def never() -> Any:
        answers.wait()

    def hangs(figures: Mapping[str, float], iteration: int) -> None:
        asked.append(iteration)
        if iteration == 2:
            answers.wait()

    monkeypatch.setattr(trackers_module, "ANSWER_S", -1.0)
    silent = Trackers({"silent": never})
    silent.log(STEP, 1)
    silent.log(STEP, 2)
    silent.close()
    monkeypatch.undo()
    monkeypatch.setattr(trackers_module, "END_S", 0.0)
    hung = Trackers({"hung": lambda: SimpleNamespace(log=hangs, close=lambda: asked.append(0))})
    hung.log(STEP, 1)
    hung.log(STEP, 2)
    wait_until(lambda: 2 in asked, "the second figures to be handed over")
    hung.close()
    answers.set()
    for service in (*silent.running.values(), *hung.running.values()):
        service.thread.join()
    assert capsys.readouterr().err == (
        "warning: silent gets no more figures (no answer for -1 s); the run goes on\n"
        "warning: hung gets no more figures (no answer for 0 s at the end); the run goes on\n"
    )


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = Trackers({"wandb": lambda: WandbRun("planner", "run", str(tmp_path), {"layout": "tp=1"})})
    assert trackers.running
    trackers.log(STEP, 40)
    trackers.close()
    [kept] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"step_time_s" in kept.read_bytes()


@pytest.mark.slow
def test_mlflow_keeps_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # Newer ones ask for a database.
    uri = (tmp_path / "runs").as_uri()
    for _ in range(2):  # The second run finds the experiment of the first.
        trackers = Trackers({"mlflow": lambda: MlflowRun("planner", uri, {"layout": "tp=1"})})
        assert trackers.running
        trackers.log(STEP, 40)
        trackers.close()
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("planner").experiment_id])
    assert len(runs) == 2
    for run in runs:
        assert run.info.status == "FINISHED" and run.data.params == {"layout": "tp=1"}
        assert run.data.metrics["step_time_s"] == 2.0
