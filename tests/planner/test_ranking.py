"""The top of the ranking: simulated pipelines, in the order that they give."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from costmodels import price
from planner import Plan, evaluate, search
from planner.ranking import first_plans
from tests.support import models

TINY = models.TINY.model_copy(update={"layers": 8})


@pytest.fixture(scope="module")
def result():
    return search("gpt-22b", world_size=64, global_batch_size=64, prefer="fastest")


def test_the_first_plans_are_ordered_by_their_simulated_pipelines(result):
    plans = result.plans(first_plans.FEWEST)
    assert all(result.prices.simulated[result.places[: len(plans)]])
    speeds = [plan.estimate.tokens_per_s for plan in plans]
    assert all(later <= sooner * (1 + 1e-8) for sooner, later in pairwise(speeds))
    for place, plan in zip(result.places, plans, strict=False):
        assert plan.estimate.tokens_per_s == pytest.approx(result.prices.tokens_per_s[place], rel=1e-12)


def test_the_others_stay_in_the_order_of_the_closed_forms(result):
    closed = price(
        result.problem.model, result.problem.cluster, result.problem.engine, result.prices.table
    ).tokens_per_s
    simulated = np.flatnonzero(result.prices.simulated)
    first = int(np.flatnonzero(np.isin(result.places, simulated)).max(initial=-1)) + 1
    assert first >= first_plans.FEWEST
    rest = closed[result.places[first_plans.MOST :]]
    assert (np.diff(np.log(rest)) <= 1e-8).all()
    assert closed[result.places[: first_plans.MOST]].min() >= rest.max() * (1 - 1e-8)
    assert sorted(result.places.tolist()) == list(range(len(result.places)))


@pytest.mark.parametrize("pin", [["pp=4"], ["pp=4", "schedule=zbv"], ["pp=2", "schedule=interleaved"], []])
def test_search_evaluate_and_saved_plans_agree(pin, tmp_path):
    found = search(TINY, world_size=16, global_batch_size=64, pin=pin)
    for rank in (0, 3, min(70, found.feasible - 1)):
        plan = found.plan(rank)
        again = evaluate(plan.layout, model=TINY)
        assert again.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-12)
        assert again.time.bubble == pytest.approx(plan.estimate.time.bubble, abs=1e-12)
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        times = loaded.timeline()
        assert times.seconds == pytest.approx(plan.timeline().seconds, rel=1e-12)
        assert times.seconds < loaded.estimate.step_time_s


def test_long_pipelines_leave_fewer_plans_to_simulate(monkeypatch):
    problem: dict[str, Any] = {
        "world_size": 16,
        "global_batch_size": 64,
        "pin": ["pp=4"],
        "prefer": "fastest",
    }
    many = search(TINY, **problem).prices.simulated.sum()
    monkeypatch.setattr(first_plans, "MOST_PASSES", 1)
    few = search(TINY, **problem).prices.simulated.sum()
    assert few == first_plans.FEWEST < many <= first_plans.MOST


def test_fewer_plans_than_are_simulated_are_all_ranked():
    found = search(TINY, world_size=4, global_batch_size=8, pin=["pp=4", "vpp=1", "recompute=none", "mbs=1"])
    assert 1 <= found.feasible < first_plans.FEWEST
    assert found.prices.simulated.all()
    assert len(found.plans(50)) == found.feasible
