"""`planner launch --try`: plans are measured, the best trains, and the trials leave nothing behind."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli.trial_table import best_plan
from costmodels.errors import InputError
from planner import Plan, search
from runtime.job.job import Job, RunOptions
from runtime.launch import trials
from runtime.settings.training_options import DataOptions, TrainingOptions
from tests.support import ROOT
from tests.support.commands import Command
from tests.support.jobs import LAYOUT, TINY, losses, write_corpus

JOB = """
import json, sys
seconds = {seconds}
if seconds is None:
    sys.stderr.write("[rank0]: Traceback (most recent call last):\\n")
    sys.stderr.write("[rank0]: torch.OutOfMemoryError: 9 GiB\\n")
    sys.exit(1)
with open({folder!r} + "/metrics.jsonl", "w") as file:
    for step in range({steps}):
        taken = 9.0 if step == 0 else seconds
        record = {{"iteration": step + 1, "step_time_s": taken, "peak_memory_bytes": {peak}, "loss": 1.0}}
        record |= {{"tokens_per_s": 1.0}}
        file.write(json.dumps(record) + "\\n")
"""
"""Stands for a job whose steps take `seconds`, the first one longer, or that dies of memory."""


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Alike, so that what one of them measures does not change the order of the others."""
    return search("gpt2-nano", world_size=2, device="cpu", max_global_batch_size=8, pin="pp=1").plans(3)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list]:
    """Takes the place of torchrun: step times in the order of the trials, and the commands asked for."""
    seen: dict[str, list] = {"seconds": [], "peaks": [], "commands": []}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def command(ranks: int, arguments: list[str]) -> list[str]:
        words = dict(pairwise(arguments))
        seen["commands"].append(list(arguments))
        number = len(seen["commands"]) - 1
        script = JOB.format(
            seconds=seen["seconds"][number],
            peak=(seen["peaks"] or [7] * 9)[number],
            folder=words["--log-dir"],
            steps=words["--train-iters"],
        )
        return [sys.executable, "-c", script]

    monkeypatch.setattr(trials, "torchrun_command", command)
    return seen


def test_the_fastest_plan_is_kept(plans, jobs, tmp_path, capsys):
    jobs["seconds"] = [0.5, 0.25, 0.75]
    assert best_plan(plans, 4, Job()).best.plan is plans[1]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*\d ", line)]
    assert [row[2] for row in rows] == ["0.5", "0.25", "0.75"]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [plan.estimate.step_time_s for plan in plans], rel=1e-3
    )
    assert ["fastest" in row for row in rows] == [False, True, False]
    assert list(tmp_path.iterdir()) == []


def test_throughput_decides_where_batches_differ(plans, jobs):
    layout = plans[1].layout
    larger = layout.model_copy(update={"global_batch_size": 2 * layout.global_batch_size})
    jobs["seconds"] = [0.4, 0.6]
    both = [plans[0], plans[1].model_copy(update={"layout": larger})]
    assert best_plan(both, 4, Job()).best.plan is both[1]
    jobs["commands"].clear()
    both = [plan.model_copy(update={"objective": "step-time"}) for plan in both]
    assert best_plan(both, 4, Job()).best.plan is both[0]


def test_the_lowest_measured_peak_is_kept_for_memory_and_said_so(plans, jobs, capsys):
    plans = [plan.model_copy(update={"objective": "memory"}) for plan in plans]
    jobs["seconds"], jobs["peaks"] = [0.25, 0.5, 0.375], [3 << 30, 2 << 30, (2 << 30) - 1000]
    assert best_plan(plans, 3, Job()).best.plan is plans[2], "equal peaks go by speed"
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*\d ", line)]
    assert [row[5:] for row in rows] == [["3"], ["2"], ["2", "lowest", "peak"]]
    assert "peak GiB" in out and "fastest" not in out


def test_a_plan_that_fails_is_dropped_with_a_line(plans, jobs, tmp_path, capsys):
    jobs["seconds"] = [None, 0.5, 0.25]
    assert best_plan(plans, 3, Job()).best.plan is plans[2]
    out = capsys.readouterr().out
    assert "try 1 is dropped: training failed with exit code 1: torch.OutOfMemoryError: 9 GiB\n" in out
    assert list(tmp_path.iterdir()) == []


def test_no_plan_that_runs_is_an_error(plans, jobs):
    jobs["seconds"] = [None, None, None]
    with pytest.raises(InputError, match="none of the 3 plans ran"):
        best_plan(plans, 3, Job())


def test_a_plan_that_training_refuses_is_dropped_unmeasured(plans, jobs, capsys):
    jobs["seconds"] = [0.5]
    splits = search("gpt2-nano", world_size=2, device="cpu", max_global_batch_size=8, pin="schedule=zbv").best
    assert best_plan([splits, plans[0]], 3, Job(training=TrainingOptions(compile=True))).best.plan is plans[0]
    assert "try 1 is dropped: --compile: schedule zbv splits backward" in capsys.readouterr().out
    assert len(jobs["commands"]) == 1


def test_trials_are_the_first_steps_of_the_run_and_write_nothing(jobs):
    jobs["seconds"] = [0.5]
    problem: dict[str, Any] = {"world_size": 2, "device": "cpu", "max_global_batch_size": 8, "pin": "mbs=1"}
    plans = search("gpt2-nano", **problem).plans(1)
    training = TrainingOptions(train_iters=500, lr_warmup_iters=20, rampup_batch_size=(2, 2, 100), lr=1e-3)
    run = RunOptions(distributed_timeout_minutes=3)
    best_plan(plans[:1], 4, Job(run=run, training=training, data=DataOptions(split="90,10,0")))
    (words,) = jobs["commands"]
    pairs = dict(pairwise(words))
    for name, value in (
        ("--train-iters", "4"),
        ("--lr-decay-iters", "500"),
        ("--lr-warmup-iters", "20"),
        ("--lr", "0.001"),
        ("--split", "90,10,0"),
        ("--distributed-timeout-minutes", "3"),
        ("--log-interval", "1"),
        ("--eval-iters", "0"),
    ):
        assert pairs[name] == value
    assert not {"--rampup-batch-size", "--save", "--load", "--tensorboard-dir"} & set(words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--try", "3", "--plan", "plan.json"), "--try 3 chooses among plans, and --plan plan.json is one"),
        (("--try", "2", "--print-command"), "--try 2 runs plans, and --print-command runs none"),
        (("--try", "0"), "--try 0: must be a number of plans of at least 1"),
        (("--try", "2", "--try-iters", "1"), "--try-iters 1: must be at least 2 steps"),
        (("--try-iters", "4"), "--try-iters 4 needs --try"),
    ],
)
def test_wrong_input_ends_in_one_line(
    planner_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    job = () if "--plan" in words else (*TINY, *LAYOUT, "--world-size", "2")
    code, out, err = planner_command("launch", *job, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"planner: error: {line}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_two_ranks_try_a_plan_and_train_with_it(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))  # The folder of torchrun and its ranks.
    data = ("--data-path", write_corpus(tmp_path), "--split", "90,10,0", "--eval-iters", "0")
    code, out, err = planner_command(
        *("launch", *TINY, *LAYOUT, "--world-size", "2", *data, "--try", "1", "--try-iters", "3"),
        *("--train-iters", "4", "--log-interval", "1", "--log-dir", folder, "--save", folder / "checkpoints"),
    )
    assert code == 0 and "warning" not in err
    plan = Plan.load(folder / "plan.json")
    assert f"try 1 of 1: {plan.layout.describe()}\n" in out
    told = json.loads((folder / "tries.json").read_text())
    assert (told["kept"], len(told["tries"])) == (plan.layout.describe(), 1)
    assert told["tries"][0]["measured_s"] == pytest.approx(
        float(re.findall(r"\n  1 +\S+ +(\S+)", out)[0]), 1e-3
    )
    (row,) = [line.split() for line in out.splitlines() if line.endswith("fastest")]
    assert float(row[1]) == pytest.approx(plan.estimate.step_time_s, rel=1e-3)
    assert float(row[2]) == pytest.approx(told["tries"][0]["measured_s"], rel=1e-3)
    assert float(row[3]) == pytest.approx(float(row[1]) / float(row[2]), abs=0.006)
    # The run starts anew: its log has its own steps only, and only it has saved.
    assert list(losses(folder)) == [1, 2, 3, 4]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    # The compiler of torch keeps a cache of all runs there.
    assert [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert not list(folder.glob("torchrun-*"))
