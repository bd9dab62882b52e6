"""The history of runs that `planner launch` writes after long enough runs, and flags that turn it off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.history.file import past_runs
from runtime.job.measurement import measurement
from tests.support import ROOT
from tests.support.commands import Command
from tests.support.jobs import LAYOUT, TINY, write_corpus


@pytest.mark.ranks
def test_a_run_is_profiled_beside_its_step_times_and_remembered(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    data = ("--data-path", write_corpus(tmp_path), "--split", "90,10,0", "--eval-iters", "0")
    job = ("launch", *TINY, *LAYOUT, "--world-size", "2", *data, "--log-interval", "1")
    folder = tmp_path / "run"
    code, _, err = planner_command(*job, "--train-iters", "20", "--log-dir", folder)
    assert (code, err.count("warning")) == (0, 0), err
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in records if "loss" in r] == list(range(1, 21))
    assert [r["iteration"] for r in records if r.get("profiled")] == [5, 6]
    (parts,) = [r for r in records if "parts" in r]
    assert parts["iteration"] == 6
    figures = measurement(folder)
    assert figures is not None and figures.parts is not None
    assert figures.parts.products > 0 and figures.parts.optimizer > 0 and figures.parts.communication > 0
    assert figures.parts.total == pytest.approx(figures.step_time_s)
    path = tmp_path / "data" / "planner" / "history.jsonl"
    (run,), wrong = past_runs(path)
    assert wrong == 0
    # The first record, which warms up, and the two that were profiled do not count.
    assert (run.records, run.layout.data_parallel, run.model.hidden) == (17, 2, 32)
    assert run.step_time_s == pytest.approx(figures.step_time_s)
    assert run.parts is not None and run.parts.products == pytest.approx(figures.parts.products)
    assert run.predicted.total == pytest.approx(run.predicted_step_time_s)
    code, _, _ = planner_command(*job, "--train-iters", "3", "--no-history", "--log-dir", tmp_path / "other")
    assert code == 0 and len(past_runs(path)[0]) == 1
