"""The order and the end of measured plans, and the stated regret, on machines that are made up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from costmodels.errors import InputError
from planner import Plan, search
from planner.ranking.measured_order import expected_steps
from runtime.job.measurement import Measurement
from runtime.launch.trial_order import SETTLED, TrialSeries, try_plans
from runtime.launch.trials import Trial


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans that differ in what their steps are made of."""
    found: list[Plan] = []
    for pins in ("dp=8", "tp=2", "tp=4", "tp=8", "pp=2", "pp=4,schedule=1f1b", "tp=2,pp=2", "recompute=full"):
        job: dict[str, Any] = {"device": "a100-80g", "global_batch_size": 32, "prefer": "fastest"}
        result = search("llama3-8b", world_size=8, pin=pins.split(","), **job)
        found += result.plans(1)
    return sorted(found, key=lambda plan: plan.estimate.step_time_s)


def seconds(plan: Plan, common: float, tensor: float = 1.0) -> float:
    """A machine that is `common` times as slow, its tensor parallelism so many times slower still."""
    time = plan.estimate.time
    return common * (time.total + (tensor - 1) * time.tensor_parallel)


def run(plans: list[Plan], most: int, common: float, tensor: float = 1.0) -> tuple[TrialSeries, list[int]]:
    order: list[int] = []

    def one(plan: Plan) -> Trial:
        order.append(plans.index(plan))
        return Trial(plan, Measurement(seconds(plan, common, tensor), 1 << 30))

    return try_plans(plans, most, one), order


def test_one_measurement_tells_the_machine_s_common_factor(plans: list[Plan]) -> None:
    before = expected_steps(plans, {})
    after = expected_steps(plans, {0: 5 * plans[0].estimate.step_time_s})
    for plan, first, second in zip(plans, before, after, strict=True):
        assert first.step_time_s == pytest.approx(plan.estimate.step_time_s)
        assert second.step_time_s == pytest.approx(5 * plan.estimate.step_time_s, rel=0.3)
        assert math.log(second.high_s / second.low_s) < 0.5 * math.log(first.high_s / first.low_s)
        assert second.low_s < second.step_time_s < second.high_s


def test_a_slow_term_is_learned_from_the_plans_that_have_much_of_it(plans: list[Plan]) -> None:
    worst = max(range(len(plans)), key=lambda place: plans[place].estimate.time.tensor_parallel)
    others = [
        place for place in range(len(plans)) if plans[place].estimate.time.tensor_parallel and place != worst
    ]
    plain = next(place for place in range(len(plans)) if not plans[place].estimate.time.tensor_parallel)
    seen = {place: seconds(plans[place], 2.0, 4.0) for place in (plain, worst)}
    found = expected_steps(plans, seen)
    for place in others:
        right = seconds(plans[place], 2.0, 4.0)
        one_factor = seconds(plans[place], 2.0)
        assert abs(math.log(found[place].step_time_s / right)) < abs(math.log(one_factor / right))


def test_it_ends_once_the_order_is_settled(plans: list[Plan]) -> None:
    tries, order = run(plans, len(plans), 3.0)
    assert order[0] == 0 and len(order) < len(plans)
    assert tries.settled and tries.best.plan is plans[0]
    assert len(tries.untried) == len(plans) - len(order)
    assert tries.regret is not None and 0 <= tries.regret <= SETTLED


def test_measurements_bring_up_a_plan_that_was_predicted_slower(plans: list[Plan]) -> None:
    by_truth = sorted(range(len(plans)), key=lambda place: seconds(plans[place], 2.0, 30.0))
    tries, order = run(plans, 5, 2.0, 30.0)
    assert plans.index(tries.best.plan) == by_truth[0]
    # A plan with as much of the slow term as the plan that showed it is not measured next.
    assert (tries.regret is not None and order != sorted(order)) or by_truth[0] == 0


def test_the_regret_that_is_said_holds_the_real_one(plans: list[Plan]) -> None:
    for tensor in (0.5, 2.0, 8.0):
        tries, _ = run(plans, 2, 1.5, tensor)
        kept = seconds(tries.best.plan, 1.5, tensor)
        real = max(0.0, kept / min(seconds(plan, 1.5, tensor) for plan in plans) - 1)
        assert tries.regret is not None and real <= tries.regret + 1e-9


def test_all_that_were_measured_leave_no_regret_and_json_says_what_was_seen(plans: list[Plan]) -> None:
    tries, order = run(plans[:2], 2, 2.0)
    told = tries.as_json()
    if len(order) == 2:
        assert (told["regret_percent"], told["untried"]) == (0.0, [])
        assert tries.describe() == "all plans were measured: no regret remains"
    tries, _ = run(plans, 1, 2.0)
    told = tries.as_json()
    assert told["kept"] == plans[0].layout.describe()
    assert told["tries"][0]["measured_s"] == pytest.approx(2 * plans[0].estimate.step_time_s)
    assert len(told["untried"]) == len(plans) - 1
    assert told["untried"][0]["low_s"] < told["untried"][0]["expected_s"]
    assert told["regret_percent"] == pytest.approx(100 * (tries.regret or 0.0))
    assert "19 times of 20" in tries.describe()


def test_memory_is_measured_in_its_order_to_the_end(plans: list[Plan]) -> None:
    by_memory = [plan.model_copy(update={"objective": "memory"}) for plan in plans]
    tries, order = run(by_memory, 3, 3.0)
    assert order == [0, 1, 2] and tries.regret is None and not tries.settled


def test_plans_that_fail_teach_nothing_and_are_errors_where_none_runs(plans: list[Plan]) -> None:
    def fails(plan: Plan) -> Trial:
        return Trial(plan, None, "out of memory")

    with pytest.raises(InputError, match="none of the 3 plans ran"):
        try_plans(plans, 3, fails)
