"""The objective that the first plan is best at, and how a plan keeps it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import ModelSpec, price
from costmodels.errors import InputError
from costmodels.pricing import Prices
from planner import Plan, search, suggest
from planner.objective import EQUAL, MEMORY_DIGITS, OBJECTIVES, parse_objective
from planner.ranking import first_plans
from tests.support.models import TINY


def keys(prices: Prices, objective: str) -> list[tuple[float, float]]:
    """Keys that rows are compared by: the first figure, and the second where the first ones are equal."""
    slowness = -np.log(prices.tokens_per_s)
    first = np.zeros(len(prices))
    if objective == "memory":
        first = np.log(prices.peak_memory_bytes).round(MEMORY_DIGITS)
    elif objective == "step-time":
        first = np.log(prices.step_time_s)
    return list(zip(first.tolist(), slowness.tolist(), strict=True))


def in_order(found: list[tuple[float, float]]) -> bool:
    """Return whether the pairs are in ascending order, up to rounding errors."""
    small = 1e-8
    return all(
        sooner[0] < later[0] - small or (sooner[0] <= later[0] + small and sooner[1] <= later[1] + small)
        for sooner, later in pairwise(found)
    )


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    objective=st.sampled_from(OBJECTIVES),
    layers=st.integers(1, 6),
    world=st.sampled_from([1, 2, 4, 6, 8]),
    batch=st.integers(8, 40),
    maximum=st.booleans(),
)
def test_every_plan_is_at_least_as_good_as_the_ones_behind_it(
    objective: str, layers: int, world: int, batch: int, maximum: bool
) -> None:
    model = ModelSpec(name="tiny", layers=layers, hidden=256, heads=8, vocab=1000, seq=128)
    sizes = {"max_global_batch_size" if maximum else "global_batch_size": batch - batch % world}
    result = search(model, world_size=world, objective=objective, prefer="fastest", **sizes)  # type: ignore[arg-type]
    ranked, problem = result.prices.take(result.places), result.problem
    assert in_order(keys(ranked, objective)[: first_plans.FEWEST])
    # Behind those whose pipelines are simulated, closed forms decide.
    closed = price(problem.model, problem.cluster, problem.engine, ranked.table)
    assert in_order(keys(closed, objective)[first_plans.MOST :])
    assert result.best is not None and result.best.objective == objective


def best(objective: str, **arguments: Any) -> Plan:
    job: dict[str, Any] = {"world_size": 64, "device": "h100", "max_global_batch_size": 64}
    return suggest("llama2-70b", objective=objective, **{**job, **arguments})


def test_the_lowest_peak_is_of_all_layouts_and_says_what_it_costs() -> None:
    result = search("llama2-70b", world_size=64, device="h100", max_global_batch_size=64, objective="memory")
    plan = result.best
    assert plan is not None
    lowest = result.prices.peak_memory_bytes.min()
    assert lowest <= plan.estimate.peak_memory_bytes <= lowest * 1.0011
    fastest = best("throughput")
    assert plan.estimate.peak_memory_bytes < 0.5 * fastest.estimate.peak_memory_bytes
    assert plan.estimate.tokens_per_s < fastest.estimate.tokens_per_s
    equal = [p for p in result.plans(20) if p.estimate.peak_memory_bytes < lowest * 1.0004]
    assert max(p.estimate.tokens_per_s for p in equal) == pytest.approx(plan.estimate.tokens_per_s)
    other = result.plan(300)
    assert "more at the peak than the best" in other.reason


def test_a_shorter_step_wins_even_if_it_is_of_fewer_sequences() -> None:
    model = ModelSpec(name="six", layers=6, hidden=1536, heads=12, vocab=32000, seq=1024)
    by_step, by_speed = (
        search(model, world_size=8, max_global_batch_size=15, objective=objective, prefer="fastest")
        for objective in ("step-time", "throughput")
    )
    assert by_step.best is not None and by_speed.best is not None
    assert by_step.best.estimate.step_time_s == by_step.prices.step_time_s.min()
    assert by_step.best.layout.global_batch_size < by_speed.best.layout.global_batch_size
    batches = by_step.table.global_batch_size[by_step.order]
    reason = by_step.plan(int(np.flatnonzero(batches == 12)[0])).reason
    assert re.fullmatch(
        r"a step of 12 sequences instead of 8, [\d.]+ % longer than the best, at [\d.]+ % more tokens/s",
        reason,
    )


def test_an_exact_batch_makes_step_time_and_cost_the_order_of_throughput() -> None:
    found = [
        search(TINY, world_size=8, global_batch_size=16, objective=objective, prefer="fastest")
        for objective in ("throughput", "step-time", "cost")
    ]
    by_throughput, *others = (result.prices.step_time_s[result.order] for result in found)
    assert np.all(np.diff(by_throughput) >= -by_throughput[1:] * EQUAL)
    for seconds in others:
        np.testing.assert_allclose(seconds, by_throughput, rtol=EQUAL)


def test_the_choice_is_saved_and_plans_of_before_were_by_throughput(tmp_path: Path) -> None:
    plan = suggest(TINY, world_size=4, global_batch_size=16, objective="memory")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values.pop("objective") == "memory"
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert Plan.load(tmp_path / "old.json").objective == "throughput"
    (tmp_path / "odd.json").write_text(json.dumps({**values, "objective": "speed"}))
    with pytest.raises(InputError, match="objective 'speed': Input should be 'throughput', "):
        Plan.load(tmp_path / "odd.json")


def test_an_unknown_objective_ends_in_one_line() -> None:
    with pytest.raises(
        InputError, match=r"^objective speed: expected one of throughput, step-time, cost, memory$"
    ):
        search(TINY, world_size=4, global_batch_size=16, objective="speed")


def test_case_and_underscores_of_an_objective_do_not_matter() -> None:
    assert parse_objective("Step_Time") == "step-time"
