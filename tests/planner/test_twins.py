"""Lists of plans: each stands for the ones that differ from it in form only, and in no estimate."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from planner.api import search
from planner.ranking.distinct import distinct_plans
from planner.ranking.twins import FORMS
from tests.support.commands import Command

PROBLEM: dict[str, Any] = {"model": "llama3-8b", "world_size": 8, "device": "h100", "global_batch_size": 64}
"""ZeRO 1 and 2 are alike for it: microbatches accumulate."""


def test_a_plan_stands_for_its_twins() -> None:
    result = search(**PROBLEM)
    rows = distinct_plans(result, 10)
    plans = result.plans(rows[-1].place + len(rows[-1].twins))
    assert len(rows) == 10 and len(plans) > 10
    assert sum(1 + len(row.twins) for row in rows) == len(plans)
    assert "zero 2" in {twin for row in rows for twin in row.twins}
    for one, other in pairwise(row.plan for row in rows):
        forms = {name: getattr(other.layout, name) for name in FORMS}
        alike = one.layout.model_copy(update=forms) == other.layout
        assert not alike or one.estimate.step_time_s != other.estimate.step_time_s
    for row in rows:
        assert plans[row.place - 1] == row.plan
        for place, twin in enumerate(row.twins, row.place):
            assert plans[place].estimate.step_time_s == row.plan.estimate.step_time_s
            assert twin.removeprefix("zero ") == str(plans[place].layout.zero_stage) or "cp_form" in twin


def test_the_best_is_compared_with_the_next_that_is_no_twin() -> None:
    batch: dict[str, Any] = {"max_global_batch_size": 16, "pin": ["tp=1", "zero=1..3"]}
    result = search("gpt2-small", world_size=8, device="h100", **batch)
    best, rival = distinct_plans(result, 2)
    assert best.twins
    assert rival.plan.layout.describe() in best.plan.reason and "zero=2" not in best.plan.reason


def test_no_plan_is_listed_twice_however_many_are_asked_for() -> None:
    result = search(**PROBLEM)
    ten = distinct_plans(result, 10)
    assert [distinct_plans(result, top) for top in (1, 2, 3)] == [ten[:top] for top in (1, 2, 3)]


def test_the_table_names_twins_in_the_row_of_the_first(planner_command: Command) -> None:
    job = ("--model", "llama3-8b", "--world-size", 8, "--device", "h100", "--global-batch-size", 64)
    code, out, _ = planner_command("suggest", *map(str, job), "--verbose")
    assert code == 0 and "= zero 2" in out and "zero=2" not in out
    assert "recompute=none (= zero 2)" in " ".join(out.split())
    code, out, _ = planner_command("suggest", *map(str, job), "--json")
    answer = json.loads(out)
    assert [plan["layout"]["zero_stage"] for plan in answer["plans"] if plan["twins"] == ["zero 2"]]
    places = [plan["place"] for plan in answer["plans"]]
    assert len(places) == 10 and places == sorted(places) and places[-1] > 10
