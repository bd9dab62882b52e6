"""The transfer of a GPU's real peaks to the process that compares them, which may have traced before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import memory_gpu
from benchmarks.memory_gpu import CASES, Case, case_command, in_process
from planner import Plan, suggest


@pytest.fixture(scope="module")
def plan() -> Plan:
    return suggest("gpt2-xl", world_size=8, device="h100", global_batch_size=64)


def stands_in(monkeypatch: pytest.MonkeyPatch, script: str) -> list[tuple[Plan, list[str]]]:
    """Run `script` in the place of the measurement; gives the plans that it could read, and the commands."""
    seen: list[tuple[Plan, list[str]]] = []

    def command(file: Path, case: Case, compiled: bool, what: str) -> list[str]:
        words = case_command(file, case, compiled, what)
        seen.append((Plan.load(file), words))
        return [sys.executable, "-c", script]

    monkeypatch.setattr(memory_gpu, "case_command", command)
    return seen


def test_each_case_is_measured_in_a_process_of_its_own(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stands_in(monkeypatch, "print('a note'); print('{\"allocated\": 7, \"reserved\": 9}')")
    case = Case("gpt2-xl", 8, 64, (), pipeline_rank=3)
    assert in_process(plan, case, True, "measured") == {"allocated": 7, "reserved": 9}
    assert in_process(plan, case, False, "traced") == {"allocated": 7, "reserved": 9}
    assert [found.layout for found, _ in seen] == [plan.layout] * 2
    words = [words[1:3] + words[4:] for _, words in seen]
    forms = [["compiled", "measured"], ["eager", "traced"]]
    assert words == [["-m", "benchmarks.memory_gpu_case", "3", *form] for form in forms]


def test_a_measurement_that_fails_says_why(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, "raise SystemExit('CUDA out of memory')")
    with pytest.raises(RuntimeError, match=r"gpt2-xl .* could not be measured: CUDA out of memory"):
        in_process(plan, CASES[0], True, "measured")


def test_cases_are_compiled_and_not_where_the_schedule_can_be() -> None:
    assert {case.forms for case in CASES if "schedule=zbv" not in case.pins} == {(True, False)}
    assert {case.forms for case in CASES if "schedule=zbv" in case.pins} == {(False,)}


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    memory_gpu.memory_gpu()
    (said,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in said
