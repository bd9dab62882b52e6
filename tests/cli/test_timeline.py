"""`planner timeline`: the drawing, the trace file, and wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.timeline import timeline
from costmodels import ModelSpec
from planner import search
from planner.options.flags import run

TINY = ModelSpec(name="tiny", layers=32, hidden=256, heads=8, vocab=1000, seq=128)


@pytest.fixture
def planner_timeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command with some words: exit code, standard output, standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        app = typer.Typer()
        app.command()(timeline)
        monkeypatch.setattr(sys, "argv", ["planner", *words])
        with pytest.raises(SystemExit) as stop:
            run(app, "planner")
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out, printed.err

    return call


def saved(folder: Path, *pin: str, batch: int = 16) -> str:
    best = search(TINY, world_size=32, global_batch_size=batch, pin=list(pin)).best
    assert best is not None
    best.save(folder / "plan.json")
    return str(folder / "plan.json")


def drawn(out: str, ranks: int) -> list[str]:
    """The lines of the drawing, without their label."""
    lines = out.splitlines()
    end = next(place for place, line in enumerate(lines) if line.split()[:2] == ["rank", "busy"])
    return [line.lstrip().split(" ", 1)[1] for line in lines[end - ranks : end]]


def test_a_short_step_is_drawn_whole(planner_timeline: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = saved(tmp_path, "pp=2", "vpp=1", "dp=4", "tp=4", "mbs=1", batch=16)
    code, out, err = planner_timeline(plan)
    assert (code, err) == (0, "")
    assert "4 microbatches on 2 pipeline ranks, schedule 1f1b" in out
    first, second = drawn(out, 2)
    for line in (first, second):
        assert [line.index(f"{kind}{number}") for kind in "FB" for number in range(4)]
        assert " ... " not in line
    assert first.index("F0") == 0 < second.index("F0") < second.index("B0") < first.index("B0")
    assert first.rstrip(".") == first and second.endswith(".")  # The first rank ends last.
    assert out.splitlines()[-3].split() == ["rank", "busy", "s", "idle", "s", "idle"]


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_the_middle_of_a_long_step_is_left_out(
    planner_timeline: Any, tmp_path: Path, monkeypatch: Any, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    plan = saved(tmp_path, "pp=4", "schedule=zbv", "dp=8", "tp=1", "mbs=1", batch=1600)
    code, out, _ = planner_timeline(plan)
    assert code == 0
    assert "F forward, I gradients of inputs, W gradients of weights" in " ".join(out.split())
    lines = drawn(out, 4)
    assert all(" ... " in line and len(line) == int(columns) - 2 for line in lines)
    assert lines[0].startswith("F0")


def test_of_many_ranks_the_first_and_the_last_are_drawn(planner_timeline: Any, tmp_path: Path) -> None:
    plan = saved(tmp_path, "pp=32", "vpp=1", "mbs=1", batch=32)
    code, out, _ = planner_timeline(plan)
    assert code == 0
    labels = [line.split()[0] for line in out.splitlines()[-16:]]
    assert labels == [str(rank) for rank in [*range(8), *range(24, 32)]]


def test_without_a_pipeline_one_rank_runs_its_micro_batches(planner_timeline: Any, tmp_path: Path) -> None:
    plan = saved(tmp_path, "pp=1", "tp=1", "cp=1", "mbs=1", batch=96)
    code, out, _ = planner_timeline(plan)
    assert code == 0
    assert "3 microbatches on 1 pipeline rank, schedule 1f1b" in out
    [line] = drawn(out, 1)
    assert "." not in line
    assert out.splitlines()[-1].split()[-2:] == ["0.0", "%"]


def test_a_trace_file_is_written(planner_timeline: Any, tmp_path: Path) -> None:
    plan, trace = saved(tmp_path, "pp=2", "mbs=1"), tmp_path / "trace.json"
    code, _, err = planner_timeline(plan, "--out", str(trace))
    assert (code, err) == (0, f"planner: saved {trace}\n")
    assert json.loads(trace.read_text())["traceEvents"]


def test_wrong_input_ends_in_one_line(planner_timeline: Any, tmp_path: Path) -> None:
    plan = saved(tmp_path, "pp=2")
    for words, line in (
        ([str(tmp_path / "none.json")], "no such file; write one with planner suggest --save"),
        ([plan, "--out", str(tmp_path / "none" / "t.json")], "cannot be written: No such file or directory"),
    ):
        code, out, err = planner_timeline(*words)
        assert (code, out) == (2, "")
        assert line in err and err.count("\n") == 1
