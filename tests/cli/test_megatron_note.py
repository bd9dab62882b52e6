"""The note on how the plan for Megatron-LM would differ: beside what a question to that engine answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.spec.layout import Layout
from planner import megatron_plan, processes
from planner.inputs.written_layout import written_fields
from planner.megatron_plan import _differences, with_other_plan
from planner.problem import resolve_problem

JOBS = [
    ("--model", "llama3-8b", "--world-size", "8", "--device", "h100", "--global-batch-size", "64"),
    ("--model", "gpt2-medium", "--world-size", "4", "--device", "a100-40g", "--global-batch-size", "32"),
    ("--model", "gpt2-small", "--world-size", "3", "--device", "h100", "--max-global-batch-size", "50"),
    (
        "--model",
        "llama2-7b",
        "--world-size",
        "4",
        "--device",
        "a100-40g",
        "--global-batch-size",
        "16",
        "--compile",
    ),
]

NOTE = "for Megatron-LM (--engine megatron)"


def words(text: str) -> list[str]:
    """The words of a described layout; `mbs=1 x 4` is one."""
    return re.split(r" (?=\w+=)", text)


@pytest.mark.parametrize("job", JOBS)
def test_it_says_what_a_question_to_that_engine_answers(planner_command: Any, job: tuple[str, ...]) -> None:
    code, out, err = planner_command("suggest", *job, "--json")
    assert code == 0, err
    answer, other = (
        json.loads(out),
        json.loads(planner_command("suggest", *job, "--engine", "megatron", "--json")[1]),
    )
    note = answer["megatron"]["text"]
    there = other["plans"][0]
    assert answer["megatron"]["layout"] == there["layout"]
    assert answer["megatron"]["step_time_s"] == there["estimate"]["step_time_s"]
    assert note.endswith(f"{there['estimate']['peak_memory_bytes'] / 2**30:.1f} GiB")
    assert other["megatron"] is None
    # The degrees in the note turn the words of this plan into those of the other.
    said = planner_command("suggest", *job)[1]
    assert f"also: {note}" in " ".join(said.split())
    here = words(said.split("\nrun:")[0].replace("\n", " "))
    mine = dict(word.split("=", 1) for word in map(str.strip, here))
    changes = answer["megatron"]["differs"]
    if "equal stages" in changes or any(re.search(r"\b(pp|vpp)=", change) for change in changes):
        mine.pop("layers", None)  # Layers of other stages, or of stages that are equal there.
    for change in changes:
        if change == "equal stages":
            continue
        if change.startswith("no "):
            del mine[change[3:].split("=")[0]]
            continue
        name, value = change.partition(" (here ")[0].split("=", 1)
        assert mine.get(name) != value
        mine[name] = value
    _, shown, _ = planner_command("suggest", *job, "--engine", "megatron")
    theirs = words(shown.split("\nrun:")[0].replace("\n", " "))
    assert {f"{name}={value}" for name, value in mine.items()} == {" ".join(word.split()) for word in theirs}
    assert ("the plan is the same" in note) == (not answer["megatron"]["differs"])


def test_it_compares_layers_of_as_many_stages_alone() -> None:
    def written(text: str) -> Layout:
        fields = written_fields(f"{text} mbs=1 x 8 precision=bf16", load_model("llama3-8b"), 2, None)
        return Layout.model_validate(fields)

    uneven = written("pp=2 layers=17+15")
    assert list(_differences(uneven, written("dp=2"))) == ["pp=1 (here 2)", "dp=2 (here 1)"]
    assert list(_differences(uneven, written("pp=2"))) == ["equal stages"]
    assert list(_differences(uneven, written("pp=2 layers=18+14"))) == ["layers=18+14 (here 17+15)"]
    assert list(_differences(written("dp=2"), uneven))[-1] == "layers=17+15"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--pin", "zero=3"), "there is no plan: pin zero_stage=3: engine megatron runs zero_stage 0, 1"),
        (
            ("--lora-rank", "8", "--quantize-base", "nf4"),
            "there is no plan: quantize-base nf4: engine megatron",
        ),
    ],
)
def test_what_that_engine_does_not_run_is_said(planner_command: Any, more: tuple[str, ...], why: str) -> None:
    code, out, err = planner_command("suggest", *JOBS[0], *more, "--json")
    assert code == 0, err
    note = json.loads(out)["megatron"]["text"]
    assert note.startswith(f"{NOTE} {why}") and "\n" not in note


@pytest.mark.parametrize("more", [("--engine", "bundled"), ("--device", "cpu"), ("--device", "ascend-910b")])
def test_other_questions_have_no_such_note(planner_command: Any, more: tuple[str, ...]) -> None:
    code, out, err = planner_command("suggest", *JOBS[1], *more, "--json")
    assert code == 0, err
    assert json.loads(out)["megatron"] is None and NOTE not in out


def test_a_model_that_megatron_has_no_words_for_has_no_plan_there(planner_command: Any) -> None:
    job = (
        "--model",
        "gpt-neox-20b",
        "--world-size",
        "8",
        "--device",
        "a100-80g",
        "--global-batch-size",
        "96",
    )
    code, out, _ = planner_command("suggest", *job, "--json")
    other = json.loads(out)["megatron"]
    assert code == 0 and other["layout"] is None
    assert "there is no plan: it does not support parallel_residual of gpt-neox-20b" in other["text"]


def test_both_searches_at_once_give_the_answers_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job: dict[str, Any] = {"device": "h100", "global_batch_size": 64}
    problem = resolve_problem("llama3-8b", 8, **job)
    alone, other = with_other_plan(problem)
    started: list[object] = []
    monkeypatch.setattr(processes.Helper, "__init__", _counted(processes.Helper.__init__, started))
    monkeypatch.setattr(megatron_plan, "RAW_LAYOUTS_PER_SECOND", 1)
    monkeypatch.setattr(megatron_plan, "helpers_for", lambda calls, seconds: int(seconds > 1e5))
    result, beside = with_other_plan(problem)
    assert started and beside == other and other is not None and other.layout is not None
    assert [plan.layout for plan in result.plans(5)] == [plan.layout for plan in alone.plans(5)]


def test_no_search_for_another_engine_is_made_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = resolve_problem("llama2-70b", 1, device="h100", global_batch_size=1)
    monkeypatch.setattr(megatron_plan, "_found", lambda _: pytest.fail("searched"))
    result, other = with_other_plan(problem)
    assert not result.feasible and other is None


def _counted(start: Callable[..., None], started: list[object]) -> Callable[..., None]:
    def counted(self: processes.Helper) -> None:
        started.append(self)
        start(self)

    return counted
