"""`planner explain` as a user types it: what it prints for people and for programs, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli import summary
from planner import search
from planner.ranking.distinct import DistinctPlan
from tests.support.commands import Command
from tests.support.scripts import MINDSPEED

JOB = ("--model", "llama2-7b", "--world-size", "16", "--device", "a100-80g", "--max-global-batch-size", "32")


@pytest.mark.slow
def test_it_prints_why_the_best_won_and_others_did_not(planner_command: Command) -> None:
    layouts = (
        "--layout",
        "tp=16,pp=1",
        "--layout",
        "tp=3",
        "--against",
        "tp=4",
        "--layout",
        "zero=0,tp=1,pp=1",
    )
    code, out, err = planner_command("explain", *JOB, *layouts)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for expected in (
        "best: tp=",
        "against tp=4",
        "for the same tokens:",
        "tensor_parallel=16, pipeline_parallel=1 lost: ",
        "number ",
        "tensor_parallel=3 is illegal: tensor_parallel 3 does not divide world size 16",
        "zero_stage=0, tensor_parallel=1, pipeline_parallel=1 does not fit: needs ",
        "GiB by pipeline rank: ",
        "change one setting",
        "bottleneck: ",
        "tokens/s with 159 GiB a device instead of 79",
        "tokens/s with 32 devices instead of 16",
    ):
        assert expected in text, expected


def test_a_pasted_script_is_explained_like_it_is_planned(planner_command: Command) -> None:
    words = ("--world-size", "8", "--no-what-if", "--max-restarts", "3", *MINDSPEED.split())
    code, out, err = planner_command("explain", *words)
    assert code == 0 and err.startswith("planner: note: not used for planning: --train-iters, ")
    assert err.count("\n") == 1
    assert "best: tp=2+sp pp=1 ep=2" in out


@pytest.mark.slow
def test_json_has_all_of_it(planner_command: Command) -> None:
    code, out, _ = planner_command("explain", *JOB, "--layout", "tp=16", "--against", "pp=4", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["best"]["fits"] and found["closest"] is None and found["advice"] is None
    assert found["indistinguishable"][0] == 1
    assert len(found["comparisons"]) == 2
    for comparison in found["comparisons"]:
        assert sum(term["first"] for term in comparison["time_s"]) == pytest.approx(
            found["best"]["estimate"]["step_time_s"], rel=1e-6
        )
    (verdict,) = found["verdicts"]
    assert verdict["outcome"] == "slower" and verdict["plan"]["layout"]["tensor_parallel"] == 16
    assert {change["kind"] for change in found["changes"]} >= {"memory", "inter_node", "batch", "devices"}
    assert found["binding"]["constraint"] in ("memory", "batch", "network", "rule", "compute")
    assert found["neighbours"][0]["ratio"] > 0


def test_changes_are_left_out_on_request(planner_command: Command) -> None:
    code, out, _ = planner_command("explain", *JOB, "--no-what-if")
    assert code == 0
    assert "bottleneck" not in out and "change one setting" in out


def test_a_saved_plan_is_explained(planner_command: Command, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert planner_command("suggest", *JOB, "--pin", "tp=8", "--save", plan)[0] == 0
    code, out, err = planner_command("explain", "--plan", plan, "--no-what-if")
    assert (code, err) == (0, "")
    assert "tp=8+sp" in out and " lost: " in " ".join(out.split())


@pytest.mark.slow
def test_where_nothing_fits_it_ends_as_suggest_does(planner_command: Command) -> None:
    pins = ("--pin", "offload_activations=false", "--pin", "offload_optimizer=false")
    job = ("--model", "llama2-70b", "--world-size", "8", "--max-global-batch-size", "16", *pins)
    suggested = planner_command("suggest", *job)
    code, out, err = planner_command("explain", *job)
    assert (code, err) == (suggested[0], suggested[2]) == (3, err)
    assert "closest: " in out and "it fits " in err


@pytest.mark.parametrize(
    ("objective", "words", "name"),
    [
        ("memory", r"x the tokens/s, peak [0-9.]+ GiB", "peak_memory_gib"),
        ("cost", r"x the tokens/s, [0-9.,]+ device-hours per 1e9 tokens", "device_hours_per_billion_tokens"),
        ("step-time", r"x the tokens/s, step [0-9.]+ m?s", "step_time_s"),
        ("throughput", r"x the tokens/s\n", "tokens_per_s"),
    ],
)
def test_what_ranks_is_shown(planner_command: Command, objective: str, words: str, name: str) -> None:
    job = ("explain", *JOB, "--objective", objective, "--no-what-if")
    code, out, _ = planner_command(*job)
    assert code == 0 and re.search(words, out)
    found = json.loads(planner_command(*job, "--json")[1])
    assert (found["objective"], found["ranked_by"]) == (objective, name)
    assert found["best_figure"] > 0 and found["neighbours"][0]["figure"] > 0


def test_pins_are_printed_as_they_are_given(planner_command: Command) -> None:
    pins = ("--pin", "offload_optimizer=false", "--pin", "recompute_modules=mlp", "--forbid", "tp=1")
    code, out, _ = planner_command("explain", *JOB, *pins, "--layout", "tp=1")
    text = " ".join(out.split())
    assert code == 0 and "False" not in text and "('mlp',)" not in text and "with without" not in text
    for expected in (
        "pinned: offload_optimizer=false, recompute_modules=mlp, recompute=selective, tensor_parallel not 1",
        "x tokens/s without the pin offload_optimizer=false: ",
        "x tokens/s without the pins recompute_modules=mlp recompute=selective: ",
        "the search is pinned to tensor_parallel not 1",
        "tensor_parallel=1 would be first: ",
    ):
        assert expected in text, expected


def test_trials_are_said_to_measure_the_first_plans_whichever_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = search("llama2-7b", world_size=8, global_batch_size=8)
    rows = [DistinctPlan(place, result.plan(place - 1)) for place in range(1, 11)]
    lines = {}
    for places in ((1, 2, 6, 7), (1, 2, 3, 4), (1, 6), (1, 2)):
        monkeypatch.setattr(summary, "indistinguishable", lambda _, places=places: places)
        lines[places] = summary.tie_line(result, rows)
    assert [line.partition("; ")[2] for line in lines.values()] == [
        f"planner launch --try {number} measures {number}" for number in (2, 3, 6, 2)
    ]
    # On several nodes it measures none.
    result = search("llama2-7b", world_size=16, global_batch_size=16)
    rows = [DistinctPlan(place, result.plan(place - 1)) for place in range(1, 3)]
    monkeypatch.setattr(summary, "indistinguishable", lambda _: (1, 2))
    line = summary.tie_line(result, rows)
    assert line is not None and "within the estimate's error" in line and "--try" not in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((*JOB, "--layout", "tp=0"), "layout: tensor_parallel=0: expected a whole number of at least 1"),
        ((*JOB, "--against", "shards=2"), "layout: shards: no such field"),
        (("--model", "llama2-7b"), "no world size"),
        (("--plan", "nowhere.json"), "plan nowhere.json: no such file"),
        (("--plan", "nowhere.json", *JOB), "--plan decides model, batch and layout: --model"),
    ],
)
def test_wrong_input_ends_in_one_line(planner_command: Command, words: tuple[str, ...], line: str) -> None:
    code, out, err = planner_command("explain", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"planner: error: {line}")
