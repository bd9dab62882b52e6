"""The check of every kind of job on one GPU: its rows, and what it says of those that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.gpu_kinds import __main__ as command
from benchmarks.gpu_kinds import attempts
from benchmarks.gpu_kinds.attempts import (
    AS_IT_IS,
    Machine,
    Result,
    attempt,
    hung,
    left_by,
    reason,
)
from benchmarks.gpu_kinds.inputs import write_inputs
from benchmarks.gpu_kinds.kinds import Kind, read_expected, read_kinds
from benchmarks.gpu_kinds.plans import plans
from benchmarks.gpu_kinds.report import largest, memory_words
from planner import suggest
from runtime.job.prediction import predicted_peak

TRAIN, KINDS = read_kinds()

ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/GroupMM.cu:94: prepare: block: [0,0,0], thread: [{},0,0] "
    "Assertion `delta % 8 == 0` failed."
)

DEVICE_SIDE = f"""
import sys
print("[rank0]: a warning about CUDA error codes")
for thread in range(3):
    print({ASSERTION!r}.format(thread))
print('  File "runtime/parallel/working_copies.py", line 1, in _first')
print("torch.AcceleratorError: CUDA error: device-side assert triggered")
print("Search for `cudaErrorAssert' for more information.")
sys.exit(1)
"""

TRAINS = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--log-dir") + 1])
rows = [{"iteration": 1, "loss": LOSS, "grad_norm": 2.0, "peak_memory_bytes": 1}, {"parts": {}}]
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, rows)))
"""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of small kinds stand in, some of which fail as a GPU lets them fail."""

    def process(peaks: Path, words: list[str]) -> list[str]:
        model = words[words.index("--model") + 1]
        script = {
            "asserts": TRAINS.replace("LOSS", "7.0") if "--no-compile" in words else DEVICE_SIDE,
            "refuses": "import sys; print('planner: error: no such thing'); sys.exit(2)",
            "drifts": TRAINS.replace("LOSS", "8.0"),
            "fits": TRAINS.replace("LOSS", "7.001"),
        }[model]
        return [sys.executable, "-c", script, *words]

    names = ("asserts", "refuses", "drifts", "fits")
    kinds = [Kind(name=name, do=(f"train --model {name}",)) for name in names]
    kinds.append(Kind(name="graphs", do=("train --model fits",), gpu="CUDA graphs"))
    monkeypatch.setattr(attempts, "process_command", process)
    monkeypatch.setattr(command, "capability", lambda: None)
    monkeypatch.setattr(command, "read_kinds", lambda: ("--seed 1", kinds))
    expected = {"losses": [7.0], "norms": [2.0]}
    monkeypatch.setattr(command, "read_expected", lambda: dict.fromkeys(names, expected))
    monkeypatch.setattr(command, "write_inputs", lambda folder: {})


def ran(folder: Path, *words: str) -> tuple[int, str, list[dict]]:
    app = typer.Typer()
    app.command()(command.gpu_kinds)
    result = CliRunner().invoke(app, ["--output", str(folder), *words])
    rows = json.loads((folder / "table.json").read_text())["rows"]
    return result.exit_code, (folder / "table.txt").read_text(), rows


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_planted_assertion_is_named_and_tried_again(tmp_path: Path) -> None:
    code, table, rows = ran(tmp_path)
    assert code == 1
    lines = table.splitlines()
    assertion = ASSERTION.format(0)
    assert f"asserts: FAILED, {assertion}" in table
    assert f"asserts, CUDA_LAUNCH_BLOCKING=1: FAILED, {assertion}" in lines
    assert any(line.startswith("asserts, not compiled: ran") for line in lines)
    # A kind that is refused on any machine is not tried again.
    assert [line for line in lines if line.startswith("refuses,")] == []
    assert "failed: asserts, refuses" in lines
    assert "ran with other losses than on a CPU: drifts" in lines
    assert "the largest difference of a loss: 14.29% (drifts)" in lines
    assert "graphs: needs a GPU (CUDA graphs)" in lines
    assert {row["kind"]: row["right"] for row in rows} == {
        "asserts": False, "refuses": False, "drifts": False, "fits": True, "graphs": True,
    }  # fmt: skip
    output = (tmp_path / "asserts" / "CUDA_LAUNCH_BLOCKING_1" / "1" / "output.txt").read_text()
    assert output.startswith("$ runtime.pretrain --model asserts --seed 1") and assertion in output


def test_peaks_of_a_gpu_are_read_beside_those_of_the_plan(tmp_path: Path) -> None:
    for name, steps in (("1", (1, 2)), ("2", (3,))):
        folder = tmp_path / name
        folder.mkdir()
        records = [
            {"iteration": step, "loss": 7.0 - step, "grad_norm": None, "peak_memory_bytes": 5 * step}
            for step in steps
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        (folder / "peaks.json").write_text('{"allocated": 12, "reserved": 20}')
    plan = suggest("gpt2-small", world_size=1, device="h100", global_batch_size=8)
    plan.save(tmp_path / "2" / "plan.json")
    found = left_by(tmp_path, on_gpu=True, is_of_plan=True)
    assert found["losses"] == (6.0, 5.0, 4.0) and len(found["norms"]) == 3
    assert (found["allocated"], found["reserved"]) == (15, 20)
    assert found["predicted"] == predicted_peak(plan).value
    result = Result(True, 1.0, **found)
    assert memory_words(result)[0].startswith("peak GiB: predicted ")
    assert "predicted" not in left_by(tmp_path, on_gpu=True, is_of_plan=False)


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_fault_of_the_command_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "left_by", lambda *_: {}["missing"])
    code, table, _ = ran(tmp_path, "--only", "fits", "--only", "graphs")
    assert code == 1 and "fits: FAILED, benchmarks.gpu_kinds: KeyError: 'missing'" in table


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_all_that_runs_right_is_no_error(tmp_path: Path) -> None:
    code, table, _ = ran(tmp_path, "--only", "fits", "--only", "graphs")
    assert code == 0 and "1 of 2 kinds ran" in table


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    code, table, _ = ran(tmp_path, "--only", "fits", "--seconds", "1")
    assert code == 1
    assert "not run, no time was left: fits" in table


@pytest.mark.slow
def test_a_process_that_hangs_says_where_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import time\nprint('the first step', flush=True)\ntime.sleep(600)"
    monkeypatch.setattr(attempts, "process_command", lambda *_: [sys.executable, "-c", script])
    machine = Machine(tmp_path / "output", tmp_path / "work", {}, "", on_gpu=False, threads=1)
    result = attempt(Kind(name="hangs", do=("train --model x",)), AS_IT_IS, machine, 1.0)
    assert not result.ran and result.said.startswith("did not end within 1 s: it said ")
    output = (tmp_path / "output" / "hangs" / "as_it_is" / "1" / "output.txt").read_text()
    assert "$ runtime.pretrain --model x" in output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x\nRuntimeError: CUDA error: illegal access\nmore", "RuntimeError: CUDA error: illegal access"),
        ("KeyError: 'a'\n\nDuring it\ntorch.OutOfMemoryError: CUDA\n\nbye", "torch.OutOfMemoryError: CUDA"),
        ("E1127 Assertion 'x' is fine\nAssertionError: 3", "AssertionError: 3"),
        ("one\ntwo\n\n", "two"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_the_line_that_says_most_is_chosen(text: str, line: str) -> None:
    assert reason(text) == line


def test_a_hang_is_told_by_the_last_words_and_the_place() -> None:
    trace = 'Current thread 0x7f (most recent call first):\n  File "a.py", line 3 in f\n'
    assert (
        hung(f"one\ntwo\nFatal Python error: Aborted\n\n{trace}  File more")
        == 'it said two; it was in File "a.py", line 3 in f'
    )


def test_what_is_not_a_number_is_far_off() -> None:
    assert largest([2.0, 3.0], [2.0, 2.0, 9.0]) == 0.5
    assert largest([2.0, float("nan")], [2.0, 2.0]) == float("inf")


def test_each_kind_that_trains_has_losses_of_a_cpu() -> None:
    expected = read_expected()
    names = {kind.name for kind in KINDS}
    assert len(names) == len(KINDS)
    for kind in KINDS:
        assert not kind.like or kind.like in names
        if any(one.startswith(("train", "alone")) for one in kind.do):
            assert len(expected[kind.like or kind.name]["losses"]) == 4, kind.name


@pytest.mark.slow
def test_every_kind_is_a_job_that_a_gpu_runs(tmp_path: Path) -> None:
    """Plans and refusals of a machine with a GPU need none."""
    machine = Machine(tmp_path, tmp_path, write_inputs(tmp_path / "inputs"), TRAIN, on_gpu=True, threads=1)
    for kind in KINDS:
        for plan in plans(kind, machine):
            assert plan.layout.micro_batches == 2, kind.name
