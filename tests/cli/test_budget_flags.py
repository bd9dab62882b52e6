"""`planner suggest`: objectives, days and money, failures, and several world sizes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner import Plan
from planner.budget.goodput import Failures
from planner.options.batch import BatchOptions
from planner.options.model import ModelOptions
from runtime.job.job import Job
from runtime.job.plan_search import search_for_job
from tests.support.commands import Command

SMALL = ("suggest", "--model", "gpt2-124m", "--device", "a100-80g", "--global-batch-size", "64")
EIGHT = (*SMALL, "--world-size", "8")
NANO = (
    "launch",
    "--model",
    "gpt2-nano",
    "--device",
    "cpu",
    "--max-global-batch-size",
    "8",
    "--print-command",
)
HELD = ("suggest", "--model", "llama2-70b", "--global-batch-size", "64", "--pin", "offload_optimizer=false")
LARGE = ("suggest", "--model", "llama3-8b", "--device", "h100", "--max-global-batch-size", "256")


def test_the_objective_is_obeyed_shown_and_saved(planner_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = (*LARGE, "--world-size", "16", "--objective", "memory")
    code, out, _ = planner_command(*words, "--json", "--save", path)
    answer = json.loads(out)
    assert code == 0 and answer["objective"] == "memory"
    peaks = [plan["estimate"]["peak_memory_bytes"] for plan in answer["plans"]]
    assert all(later >= sooner * 0.998 for sooner, later in pairwise(peaks))
    _, by_speed, _ = planner_command(*LARGE, "--world-size", "16", "--json", "--top", "1")
    assert json.loads(by_speed)["objective"] == "throughput"
    assert peaks[0] < json.loads(by_speed)["plans"][0]["estimate"]["peak_memory_bytes"]
    assert Plan.load(path).objective == "memory"
    _, out, _ = planner_command(*words)
    assert "ranked by memory: lowest peak of memory" in out


def test_a_step_under_a_maximum_is_said_to_be_of_different_batches(planner_command: Command) -> None:
    note = "steps of the largest batch up to 256 that each layout can run are compared"
    words = ("--world-size", "8", "--objective", "step-time", "--json")
    _, out, _ = planner_command(*LARGE, *words)
    assert any(line.startswith(note) for line in json.loads(out)["notes"])
    _, out, _ = planner_command(*SMALL, *words)
    assert json.loads(out)["notes"] == []


def test_the_job_that_plans_for_itself_obeys_the_objective() -> None:
    batch = BatchOptions(max_global_batch_size=8, objective="memory")
    plan = search_for_job(Job(model=ModelOptions(model="gpt2-nano"), batch=batch), "cpu", 4, 4).plan(0)
    assert plan.objective == "memory"


def test_days_and_money_and_failures_are_shown_when_asked_for(
    planner_command: Command, tmp_path: Path
) -> None:
    words = ("--tokens", "300B", "--price-per-hour", "2.5", "--mtbf-hours", "5000", "--checkpoint-gbps", "10")
    path = tmp_path / "plan.json"
    code, out, _ = planner_command(*EIGHT, *words, "--json", "--top", "2", "--save", path)
    answer = json.loads(out)
    assert code == 0
    run = answer["plans"][0]["run"]
    expected = Plan.load(path).run(3 * 10**11, 2.5, Failures(5000.0, 10.0))
    assert (run["tokens"], run["days"], run["money"]) == (3 * 10**11, expected.days, expected.money)
    assert expected.goodput is not None and run["goodput"]["share"] == expected.goodput.share
    assert run["days"] <= answer["plans"][1]["run"]["days"]
    _, out, _ = planner_command(*EIGHT, *words)
    text = " ".join(out.split())
    assert "run of 300B tokens: " in text and " device-hours, cost " in text
    assert "goodput 9" in text and "failures: one every 26 days, restart in 10" in text
    assert (
        "assumed: a restart takes 10 minutes (--restart-seconds); no evaluation (--eval-interval); " in text
    )


def test_nothing_of_it_is_shown_unless_asked_for(planner_command: Command) -> None:
    _, out, _ = planner_command(*EIGHT, "--json", "--top", "1")
    assert "run" not in json.loads(out)["plans"][0]
    _, out, _ = planner_command(*EIGHT)
    assert "run of" not in out and "goodput" not in out and "cost" not in out
    _, out, _ = planner_command(*EIGHT, "--tokens", "1T")
    assert "run of 1T tokens" in out and "goodput" not in out and "cost" not in out
    _, out, _ = planner_command(*EIGHT, "--price-per-hour", "2")
    assert "run of 1B tokens" in out and "in the unit of your price, 2 a device-hour" in " ".join(out.split())


@pytest.mark.slow
def test_a_range_of_sizes_has_a_row_for_each_and_saves_the_chosen_one(
    planner_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    words = (*HELD, "--world-size", "4..64", "--tokens", "1T", "--save", path)
    code, out, err = planner_command(*words, "--json")
    answer = json.loads(out)
    assert code == 0
    assert [size["world_size"] for size in answer["sizes"]] == [4, 8, 16, 24, 32, 48, 64]
    none = answer["sizes"][0]
    assert none["plan"] is none["run"] is None and none["problem"].startswith("needs ")
    assert answer["chosen"] == 64 == Plan.load(path).layout.world_size
    assert answer["front"] == [size["world_size"] for size in answer["sizes"] if size["on_front"]]
    assert f"saved {path}, the plan for 64 devices" in err
    _, out, _ = planner_command(*words, "--price-per-hour", "2", "--mtbf-hours", "50000")
    assert "recommended: 64 devices" in out
    assert "no plan" in out and "4: needs " in out and "cost" in out and "goodput" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_the_cheapest_size_is_chosen_for_cost(planner_command: Command, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    words = (*SMALL, "--world-size", "8,16,64", "--objective", "cost", "--timeline", timeline)
    code, out, err = planner_command(*words, "--json")
    answer = json.loads(out)
    hours = {size["world_size"]: size["run"]["device_hours"] for size in answer["sizes"]}
    assert code == 0 and answer["chosen"] == min(hours, key=lambda world: hours[world]) < 64
    assert timeline.is_file() and f"the plan for {answer['chosen']} devices" in err


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ((*EIGHT, "--objective", "speed"), 2, "objective speed: expected one of throughput, step-time, cost"),
        ((*EIGHT, "--tokens", "many"), 2, "tokens many: expected a number such as 1e12, 300B or 15T"),
        ((*EIGHT, "--price-per-hour", "-1"), 2, "--price-per-hour -1: expected money above 0"),
        ((*EIGHT, "--price-per-hour", "cheap"), 2, "--price-per-hour cheap: expected money above 0"),
        ((*EIGHT, "--mtbf-hours", "0"), 2, "--mtbf-hours 0: expected hours above 0"),
        ((*EIGHT, "--mtbf-hours", "1e306"), 2, "--mtbf-hours 1e+306: expected hours above 0"),
        (
            (*EIGHT, "--price-per-hour", "1e308", "--json"),
            2,
            "--price-per-hour 1e308: expected money above 0",
        ),
        (
            (*SMALL, "--world-size", "16777216"),
            2,
            "--world-size 16777216: expected a whole number of",
        ),
        ((*SMALL, "--world-size", "1..16777216"), 2, "'16777216' is not a number of devices"),
        (
            (*LARGE[:-1], "9" * 17, "--world-size", "8"),
            2,
            "--max-global-batch-size 99999999999999999: ",
        ),
        ((*EIGHT, "--mtbf-hours", "1e-6"), 2, "--mtbf-hours 1e-06 of 8 devices: one fails every"),
        ((*EIGHT, "--tokens", "1T", "--save-interval", "0"), 2, "--save-interval 0: "),
        (
            (*EIGHT, "--mtbf-hours", "9", "--checkpoint-gbps", "0"),
            2,
            "--checkpoint-gbps 0: expected gigabits",
        ),
        (
            (*EIGHT, "--mtbf-hours", "9", "--restart-seconds", "-1"),
            2,
            "--restart-seconds -1: expected seconds",
        ),
        (
            (*SMALL, "--world-size", "many"),
            2,
            "'--world-size': 'many' is not a whole number; expected one, or",
        ),
        ((*SMALL, "--world-size", "8..many"), 2, "--world-size 8..many: 'many' is not a number of devices"),
        ((*SMALL, "--world-size", "64..8"), 2, "--world-size 64..8: expected the smaller end first, 8..64"),
        ((*SMALL, "--world-size", "9..15"), 2, "--world-size 9..15: no whole nodes of 8 devices"),
        ((*SMALL, "--world-size", "8,16", "--top", "3"), 2, "--top 3: of several world sizes only the best"),
        ((*HELD, "--world-size", "2,4", "--json"), 3, "no layout of llama2-70b fits 4 x a100-80g"),
        ((*NANO, "--world-size", "2..4"), 2, "'--world-size': '2..4' is not a whole number"),
        ((*NANO, "--world-size", "2", "--objective", "speed"), 2, "objective speed: expected one of"),
    ],
)
def test_wrong_input_ends_in_one_line(
    planner_command: Command, words: tuple[Any, ...], code: int, line: str
) -> None:
    ended, _, err = planner_command(*words)
    errors = [text for text in err.splitlines() if text.startswith("planner: error: ")]
    assert ended == code and len(errors) == 1 and line in errors[0]
    assert "Traceback" not in err
