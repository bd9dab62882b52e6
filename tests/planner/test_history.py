"""The history of a user: whole lines, from several processes, and nothing that a broken one could break."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from costmodels.catalogue.measured_devices import Machine
from costmodels.errors import InputError
from costmodels.spec.estimate import StepTime
from planner import Plan, suggest
from planner.history.file import PastRun, append, history_file, past_runs
from planner.history.step_parts import StepParts, predicted_parts


@pytest.fixture(scope="module")
def plan() -> Plan:
    return suggest(model="gpt2-nano", world_size=2, device="cpu", max_global_batch_size=8)


def past_run(plan: Plan, step_time_s: float = 0.5, parts: StepParts | None = None) -> PastRun:
    """A run of a plan on the machine of the test."""
    estimate = plan.estimate
    return PastRun(
        date="2026-11-23",
        machine=Machine.here(),
        software={"torch": "2.15.0"},
        model=plan.model,
        layout=plan.layout,
        cluster=plan.cluster,
        engine=plan.engine.name,
        compiled=False,
        records=4,
        step_time_s=step_time_s,
        peak_memory_bytes=1e9,
        predicted_step_time_s=estimate.step_time_s,
        predicted_low_s=estimate.step_time_low_s,
        predicted_high_s=estimate.step_time_high_s,
        predicted_peak_bytes=estimate.peak_memory_bytes,
        predicted=StepParts(products=estimate.step_time_s),
        parts=parts,
    )


def test_runs_are_read_back_as_they_were(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    assert past_runs(path) == ([], 0)
    runs = [past_run(plan, 0.5), past_run(plan, 0.25, StepParts(products=0.2, collectives={"all_gather": 1}))]
    for run in runs:
        append(run, path)
    assert past_runs(path) == (runs, 0)


def test_lines_that_are_none_are_counted_and_a_torn_one_swallows_no_other(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append(past_run(plan), path)
    whole = path.read_text()
    negative = json.dumps(json.loads(whole) | {"step_time_s": -1})
    later = json.dumps(json.loads(whole) | {"version": 2})
    path.write_text(f"{negative}\n{later}\n\n{whole}{whole[:200]}")
    append(past_run(plan), path)
    runs, wrong = past_runs(path)
    assert (len(runs), wrong) == (2, 3)


def _writes(path: Path, run: PastRun) -> None:
    for _ in range(20):
        append(run, path)


def test_several_processes_write_whole_lines(plan: Plan, tmp_path: Path) -> None:
    path, context = tmp_path / "history.jsonl", multiprocessing.get_context("fork")
    processes = [context.Process(target=_writes, args=(path, past_run(plan))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    runs, wrong = past_runs(path)
    assert (len(runs), wrong) == (60, 0)


def test_a_folder_in_its_place_is_refused_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"history .*: cannot be read"):
        past_runs(tmp_path)


def test_it_lies_where_the_desktop_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert history_file() == Path("/somewhere/planner/history.jsonl")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert history_file() == Path.home() / ".local/share/planner/history.jsonl"


def test_predicted_parts_add_up_to_the_step(plan: Plan) -> None:
    parts = predicted_parts(plan.estimate.time)
    assert sum(parts.values()) == pytest.approx(plan.estimate.step_time_s)


def test_recomputed_work_is_of_the_kinds_of_the_layers() -> None:
    none = dict.fromkeys(StepTime.model_fields, 0.0)
    time = StepTime(**none | {"compute": 6.0, "attention": 2.0, "elementwise": 2.0, "recompute": 5.0})
    found = predicted_parts(time)
    assert (found["products"], found["attention"], found["elementwise"]) == (9.0, 3.0, 3.0)
