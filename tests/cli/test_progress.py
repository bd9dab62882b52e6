"""The display of a job while it runs and when it ends; no fault of the display may end the job."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
from cli import launch
from cli.job_end import JobEnd
from cli.progress import Display, short_line
from cli.status import Status
from planner.plan import Plan
from runtime.job.continuation import PreviousRun
from runtime.job.job import Job
from runtime.job.prediction import PEAK_TOLERANCE
from runtime.launch.launch_options import LaunchOptions
from runtime.launch.restarts import Display as Shows
from runtime.launch.supervisor import JobStopped, Outcome
from runtime.logs import console
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions
from tests.support.commands import Command
from tests.support.jobs import LAYOUT, TINY, write_corpus

STEP = {"iteration": 40, "loss": 3.0262, "step_time_s": 2.0, "tokens_per_s": 102_400.0}
LOG = " [2026-11-22 21:02:00.302092] iteration       40/     150 | consumed samples:          320 |"


class Screen(Status):
    """A terminal, of which lines are kept."""

    def __init__(self, on_screen: bool = True) -> None:
        super().__init__()
        self.on_screen = on_screen
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def shown(*told: str | dict[str, Any], on_screen: bool = True) -> list[str]:
    """The lines of a display that is told of lines and records."""
    screen = Screen(on_screen)
    display = Display(screen, 150)
    for item in told:
        if isinstance(item, str):
            display.line(item)
        else:
            display.metrics(item)
    display.end()
    return screen.lines


def test_a_terminal_has_a_short_line_for_each_record() -> None:
    validation = {"iteration": 40, "validation_loss": 2.5}
    line = " validation loss at iteration 40 | lm loss value: 2.500000E+00 | lm loss PPL: 1.2E+01 |"
    test = {"iteration": 150, "test_loss": math.pi}
    expected = [
        "training",
        "step  40/150  loss 3.026  102K tokens/s  ETA 0:03:40",
        "step  40/150  validation loss 2.500",
        "step 150/150  test loss 3.142",
    ]
    expected[1] = expected[1].replace("102K", "102,400")
    last = " test loss at iteration 150 | lm loss value"
    assert shown("training", LOG, STEP, line, validation, last, test) == expected
    # Records may come together, ahead of the lines.
    assert shown("training", STEP, validation, LOG, line, last, test) == expected
    assert shown("training", LOG, STEP, line, validation, on_screen=False) == ["training", LOG, line]
    # A line that says the same as the short one comes between the log's and its record.
    assert shown(LOG, "progress: 40 of 150 steps (26.7 %), ETA 0:03:40", STEP) == expected[1:2]
    # Or after the next line.
    assert shown("training", LOG, line, STEP, validation, last, test) == expected
    # As where metrics.jsonl cannot be written.
    assert shown(LOG, "saved", line) == [LOG, "saved", line]
    # Steps before a restart have records without lines.
    assert shown(STEP, "resumed") == ["resumed"]


@pytest.mark.parametrize("loss", [None, 1e-9, 12345.678, 1e30])
def test_short_lines_fit_into_80_columns(loss: float | None) -> None:
    record = {"iteration": 9, "loss": loss, "step_time_s": 999.0, "tokens_per_s": 123_456_789.0}
    line = short_line(record, 99_999_999)
    assert len(line) < 80, line
    assert ("loss is no number" in line) == (loss is None)


def test_a_display_that_fails_is_told_once_and_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Screen):
        def line(self, text: str) -> None:
            raise TypeError("unsupported format string")

    display = Display(Broken(), 150)
    for _ in range(3):
        display.line("training")
        display.metrics({"no": "iteration"})
    display.end()
    errors = capsys.readouterr().err
    assert errors.count("warning") == 1 and errors.count("\n") == 1
    assert "TypeError: unsupported format string" in errors and "output.log" in errors


def test_phases_of_a_job_are_lines_of_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Status() as status:
        display = Display(status, 150)
        status.tell("starting 2 ranks")
        display.line("runtime: building the model ...")
        display.line("runtime: building the model ...")
        display.line("training")
    assert capsys.readouterr() == ("training\n", "planner: starting 2 ranks\nplanner: building the model\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
def test_what_cannot_be_written_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(console, "_told", set())
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console.say("one")
        console.say("two")
    assert capsys.readouterr().err == (
        "warning: standard output cannot be written (No space left on device); the job goes on\n"
    )
    with (tmp_path / "ascii").open("w", encoding="ascii") as narrow:
        console.say("größe", narrow)
        console.say("more", narrow)
    assert (tmp_path / "ascii").read_text() == "gr\\xf6\\xdfe\nmore\n"
    monkeypatch.setattr(sys, "stdout", None)
    console.say("closed")


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """`planner launch` of a small job that saves."""
    data = write_corpus(tmp_path)
    words = ["launch", *TINY, *LAYOUT, "--world-size", "2", "--data-path", data, "--split", "90,10,0"]
    return [*words, "--log-dir", str(tmp_path / "run"), "--save", str(tmp_path / "saved")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
def test_neither_a_loss_that_is_no_number_nor_a_full_disk_ends_the_launcher(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    seen: list[str] = []

    def job(_plan: Plan, _job: Job, _restarts: int, display: Shows, _warm: object) -> Outcome:
        for iteration in (1, 2):
            display.line(LOG)
            display.metrics(STEP | {"iteration": iteration, "loss": None})
            seen.append(f"step {iteration}")
        return Outcome(0, "")

    monkeypatch.setattr(launch, "run_with_restarts", job)
    monkeypatch.setattr(console, "_told", set())
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = planner_command(*small)
    assert (code, seen) == (0, ["step 1", "step 2"])
    assert err.count("warning: standard output cannot be written (No space left on device)") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        (Outcome(0, "", stopped_by=signal.SIGTERM), 0, "stopped by SIGTERM"),
        (Outcome(0, "", stopped_by=signal.SIGINT), 130, "stopped by SIGINT"),
        (JobStopped(signal.SIGTERM), 143, "stopped by SIGTERM"),
        (JobStopped(signal.SIGINT), 130, "stopped by SIGINT"),
        (Outcome(4, "diverged"), 4, "error: diverged"),
        (Outcome(2, "disk full", stopped_by=signal.SIGINT), 2, "error: disk full"),
    ],
)
def test_every_end_has_its_exit_code_and_says_what_is_kept(
    planner_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    small: list[str],
    end: Outcome | JobStopped,
    code: int,
    says: str,
) -> None:
    def job(*_: Any) -> Outcome:
        if isinstance(end, JobStopped):
            raise end
        return end

    monkeypatch.setattr(launch, "run_with_restarts", job)
    found, out, err = planner_command(*small)
    assert found == code
    assert says in err
    assert out.splitlines()[-1] == f"there is no checkpoint in {small[-1]} yet"


def checkpoint_of(folder: Path, iteration: int) -> None:
    """Write the files that mark a whole checkpoint."""
    target = folder / f"iter_{iteration:07d}"
    target.mkdir(parents=True)
    (target / "manifest.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def ending(plan: Plan, folder: Path, step_s: float, peak: float, start: int = 0) -> JobEnd:
    """The end of a run of 100 iterations that logged these figures after iteration 40."""
    records = [
        {"iteration": 10, "step_time_s": 1e9, "peak_memory_bytes": 1},
        {"iteration": 50, "step_time_s": step_s, "peak_memory_bytes": int(peak)},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = OutputOptions(save=str(folder / "my runs"), load="elsewhere", ckpt_step=3, finetune=True)
    job = Job(
        run=LaunchOptions(str(folder / "plan.json"), max_restarts=2),
        training=TrainingOptions(lr=1e-3),
        data=DataOptions(data_path=["text"]),
        output=output,
    )
    return JobEnd(plan, job, folder, start)


def test_the_end_names_the_checkpoint_and_the_command_that_goes_on(tmp_path: Path) -> None:
    plan = planner.suggest("gpt2-124m", world_size=2, device="h100", global_batch_size=8)
    estimate = plan.estimate
    tensors = max(stage.total - stage.overhead for stage in estimate.memory)
    checkpoint_of(tmp_path / "my runs", 40)
    inside = list(ending(plan, tmp_path, estimate.step_time_s, tensors, start=40).lines())
    assert inside[0] == f"last checkpoint: {tmp_path}/my runs/iter_0000040, of iteration 40 of 100"
    words = shlex.split(inside[1].removeprefix("to go on: "))
    assert words[:4] == ["planner", "launch", "--plan", str(tmp_path / "plan.json")]
    given = list(zip(words[2::2], words[3::2], strict=True))
    saved = str(tmp_path / "my runs")
    for pair in (("--lr", "0.001"), ("--data-path", "text"), ("--load", saved), ("--save", saved)):
        assert pair in given
    assert "--ckpt-step" not in words and "--finetune" not in words
    assert inside[-2].startswith("the step is in the predicted range")
    assert inside[-1].startswith("the peak is in the predicted range")
    out = [
        (estimate.step_time_high_s * 1.01, tensors * (1 + PEAK_TOLERANCE + 0.01), "slower than", "above"),
        (estimate.step_time_low_s * 0.99, tensors * (1 - PEAK_TOLERANCE - 0.01), "faster than", "below"),
    ]
    for step_s, peak, speed, size in out:
        lines = list(ending(plan, tmp_path, step_s, peak, start=40).lines())
        assert lines[-2].startswith(f"the step is {speed} the predicted range")
        assert lines[-1].startswith(f"the peak is {size} the predicted range")


def test_a_run_that_is_complete_can_be_made_longer(tmp_path: Path) -> None:
    plan = planner.suggest("gpt2-124m", world_size=2, device="h100", global_batch_size=8)
    checkpoint_of(tmp_path / "my runs", 100)
    lines = list(ending(plan, tmp_path, 1.0, 1.0).checkpoint_lines())
    assert lines[0].endswith("of iteration 100 of 100")
    assert "--train-iters 200" in lines[1]


def test_what_is_left_of_a_resumed_run_is_predicted(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    monkeypatch.setattr(launch, "previous_run", lambda output: PreviousRun(iteration=40))
    monkeypatch.setattr(launch, "run_with_restarts", lambda *_: Outcome(0, ""))
    code, out, _ = planner_command(*small)
    assert code == 0 and " for 60 iterations" in out
