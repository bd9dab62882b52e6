"""`planner launch --max-restarts`: what is started again, with what, and what ends for good."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels.errors import InputError
from runtime import checkpoint
from runtime.faults.error_file import Report, read_report, report
from runtime.job.job import Job, RunOptions
from runtime.job.resumption import continuation
from runtime.launch import restarts
from runtime.launch.launch_options import LaunchOptions
from runtime.launch.restarts import run_with_restarts
from runtime.launch.supervisor import Outcome
from runtime.settings.training_options import OutputOptions
from tests.support import ROOT
from tests.support.jobs import TIMEOUT_S, wait_until
from tests.support.running_jobs import is_alive

LOST = Outcome(1, "rank 1 was killed by SIGKILL", restart=True)
REFUSED = Outcome(2, "the corpus is empty")
DONE = Outcome(0, "")


class Screen:
    """The lines that a user sees."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def metrics(self, record: dict[str, Any]) -> None:
        raise AssertionError(record)


@pytest.mark.parametrize(
    ("outcomes", "most", "starts", "end"),
    [
        ([LOST, LOST, DONE], 3, 3, DONE),
        ([LOST, LOST], 1, 2, LOST),
        ([REFUSED], 3, 1, REFUSED),
        ([LOST, REFUSED], 3, 2, REFUSED),
        ([LOST], 0, 1, LOST),
    ],
)
def test_passing_failures_are_gone_on_from(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Outcome],
    most: int,
    starts: int,
    end: Outcome,
) -> None:
    plan = planner.suggest("gpt2-124m", world_size=4, device="h100", global_batch_size=8)
    plan.save(tmp_path / "plan.json")
    calls: list[tuple[list[str], int, int]] = []

    def run_job(command: list[str], ranks: int, *_: Any, restarts: int, saves: bool, warm: None) -> Outcome:
        assert saves
        calls.append((command, ranks, restarts))
        return outcomes[len(calls) - 1]

    monkeypatch.setattr(restarts, "run_job", run_job)
    # A device was lost with the rank.
    monkeypatch.setattr(restarts, "usable_ranks", lambda plan: plan.layout.world_size - 1)
    monkeypatch.setattr(checkpoint, "latest_iteration", lambda folder: 20)
    output = OutputOptions(save="saved", load="elsewhere", ckpt_step=7, finetune=True, log_dir=str(tmp_path))
    screen = Screen()
    job = Job(run=RunOptions(str(tmp_path / "plan.json")), output=output)
    outcome = run_with_restarts(plan, job, most, screen)
    assert outcome == end and len(calls) == starts
    assert [restarts for _, _, restarts in calls] == list(range(starts))
    assert [ranks for _, ranks, _ in calls] == [4, 3, 3][:starts]
    loads = [command[command.index("--load") + 1] for command, _, _ in calls]
    assert loads == ["elsewhere", "saved", "saved"][:starts]
    for once in ("--ckpt-step", "--finetune"):
        assert [once in command for command, _, _ in calls] == [True, False, False][:starts]
    assert len(screen.lines) == starts - 1
    if screen.lines:
        assert screen.lines[0] == (f"planner: rank 1 was killed by SIGKILL; restart 1 of {most} with 3 ranks")


def test_a_job_that_has_saved_nothing_begins_again(tmp_path: Path) -> None:
    job = Job(output=OutputOptions(save=str(tmp_path), load="elsewhere", ckpt_step=7))
    assert continuation(job) == job


def test_restarts_need_a_place_to_go_on_from() -> None:
    with pytest.raises(InputError, match="--max-restarts needs --save FOLDER"):
        LaunchOptions(max_restarts=1).check(OutputOptions())
    with pytest.raises(InputError, match="--max-restarts -1: must be 0"):
        LaunchOptions(max_restarts=-1).check(OutputOptions())
    LaunchOptions(max_restarts=1).check(OutputOptions(save="somewhere"))


def test_what_a_job_says_of_its_end_reaches_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    report("nobody listens", 1)
    assert read_report(path) is None
    monkeypatch.setenv("PLANNER_ERROR_FILE", str(path))
    report("hang: rank 3", 1, restart=True)
    assert read_report(path) == Report("hang: rank 3", 1, True)
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"message": "half')
    assert read_report(path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_killed_launcher_leaves_no_job(tmp_path: Path) -> None:
    script = f"""
        from pathlib import Path
        from runtime.launch.supervisor import run_job
        job = ["{sys.executable}", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"]
        run_job(job, 1, Path({str(tmp_path)!r}), lambda line: print(line, flush=True), print)
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    job = int(launcher.stdout.readline())
    assert is_alive(job)
    launcher.send_signal(signal.SIGKILL)
    assert launcher.wait(TIMEOUT_S) == -signal.SIGKILL
    wait_until(lambda: not is_alive(job), "the job to end with its launcher")
    launcher.stdout.close()
