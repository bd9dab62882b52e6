"""Lists of plans: each stands for the ones that differ from it in form only, and in no estimate."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from planner.api import search
from planner.ranking.distinct import distinct_plans
from planner.ranking.result import SearchResult
from planner.ranking.twins import FORMS
from tests.support.commands import Command

PROBLEM: dict[str, Any] = {"model": "llama3-8b", "world_size": 8, "device": "h100", "global_batch_size": 64}
"""ZeRO 1 and 2 are alike for it: micro batches accumulate."""


def test_a_plan_stands_for_its_twins() -> None:
    result = search(**PROBLEM)
    _, rows = distinct_plans(result, 10)
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


def test_places_with_twins_are_settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = search(**PROBLEM), []
    settle = SearchResult.settle
    monkeypatch.setattr(
        SearchResult, "settle", lambda own, top, *rest: asked.append(top) or settle(own, top, *rest)
    )
    _, rows = distinct_plans(result, 10)
    assert asked == [rows[-1].place + len(rows[-1].twins) + 1]


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(PROBLEM, marks=pytest.mark.slow),
        {"model": "gpt-22b", "world_size": 64, "max_global_batch_size": 16},
    ],
    ids=["some twins", "small"],
)
def test_plans_whose_bytes_nobody_looks_at_have_the_same_places(problem: dict[str, Any]) -> None:
    result = search(**problem)
    settled, rows = distinct_plans(result, 10, shows_bytes=False)
    whole, others = distinct_plans(result, 10)
    assert settled.feasible == whole.feasible
    assert [(row.place, row.twins, row.plan.layout, row.plan.reason) for row in rows] == [
        (row.place, row.twins, row.plan.layout, row.plan.reason) for row in others
    ]
    limit = rows[0].plan.cluster.memory_bytes
    for row, other in zip(rows, others, strict=True):
        if row.plan != other.plan:
            assert other.plan.estimate.exact and not row.plan.estimate.exact and not row.twins
            assert max(each.plan.estimate.peak_memory_bytes for each in (row, other)) < limit
    assert rows[0].plan == others[0].plan
    assert problem is PROBLEM or rows[-1].plan != others[-1].plan


def test_the_best_is_compared_with_the_next_that_is_no_twin() -> None:
    batch: dict[str, Any] = {"max_global_batch_size": 16, "pin": ["tp=1", "zero=1..3"]}
    result = search("gpt2-small", world_size=8, device="h100", **batch)
    _, (best, rival) = distinct_plans(result, 2)
    assert best.twins
    assert rival.plan.layout.describe() in best.plan.reason and "zero=2" not in best.plan.reason


def test_no_plan_is_listed_twice_however_many_are_asked_for() -> None:
    result = search(**PROBLEM)
    _, ten = distinct_plans(result, 10)
    assert [distinct_plans(result, top)[1] for top in (1, 2, 3)] == [ten[:top] for top in (1, 2, 3)]


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
