"""The recommendation among several sizes of a cluster: deadlines, budgets, the knee."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.errors import InputError
from planner.budget.goal import Goal, parse_goal, verdict_line
from planner.budget.money import Money, money_text, parse_money
from planner.budget.recommendation import Recommendation, front, recommend
from planner.budget.run import Run


def run_of(days: float, devices: int, price: float = 1.0, spread: float = 1.1) -> Run:
    """A run of so many days; money is device-hours times the price."""
    hours = days * 24 * devices
    ends = (days / spread, days * spread)
    return Run(
        tokens=10**12,
        steps=1,
        days=days,
        days_low=ends[0],
        days_high=ends[1],
        device_hours=hours,
        money=hours * price,
        money_low=hours * price / spread,
        money_high=hours * price * spread,
        price_per_hour=price,
        currency="$",
        goodput=None,
        training_days=days,
        whole=None,
    )


def runs_of(**days: float) -> dict[int, Run]:
    return {int(name[1:]): run_of(each, int(name[1:])) for name, each in days.items()}


RUNS = runs_of(d64=100.0, d128=52.0, d256=30.0, d512=24.0)
"""Device-days: 6,400, 6,656, 7,680, 12,288."""


def recommended(runs: dict[int, Run], goal: Goal) -> Recommendation:
    found = recommend(runs, goal)
    assert found is not None
    return found


def test_with_a_deadline_the_cheapest_size_in_time_is_recommended() -> None:
    found = recommended(RUNS, Goal(60.0))
    assert (found.world_size, found.rule, found.keeps_goal) == (128, "deadline", True)
    assert found.why.startswith("it is the cheapest of 3 sizes that take at most 60 days")
    # The upper end of its range, 57.2 days, is in time too; that of 128 devices in 55 days is not.
    assert "one such run" not in found.why
    later = recommended(RUNS, Goal(55.0)).why
    assert later.endswith("one such run in ten takes more than 57.2 days: 256 devices are in time even then")


def test_a_smaller_size_that_is_dearer_is_not_recommended() -> None:
    runs = runs_of(d64=100.0, d96=90.0, d128=45.0)
    assert recommended(runs, Goal(95.0)).world_size == 128


def test_with_a_budget_the_fastest_size_that_is_paid_for_is_recommended() -> None:
    paid = RUNS[256].money
    assert paid is not None
    found = recommended(RUNS, Goal(None, Money(paid, "$")))
    assert (found.world_size, found.rule, found.keeps_goal) == (256, "budget", True)
    assert found.why == "it is the fastest of 3 sizes that cost at most $184,320"
    assert recommended(RUNS, Goal(None, Money(paid - 1, "$"))).world_size == 128


def test_with_both_the_cheapest_that_keeps_both_is_recommended() -> None:
    found = recommended(RUNS, Goal(60.0, Money(200_000, "$")))
    assert (found.world_size, found.rule) == (128, "deadline and budget")
    assert "take at most 60 days and cost at most $200,000" in found.why


@pytest.mark.parametrize(
    ("goal", "size", "words"),
    [
        (Goal(10.0), 512, "no size here keeps the goal to take at most 10 days: 512 devices come closest"),
        (Goal(None, Money(10.0, "$")), 64, "to cost at most $10: 64 devices cost least, $153,600"),
        (Goal(30.0, Money(10.0, "$")), 256, "of those that are in time 256 devices cost least, $184,320"),
    ],
)
def test_a_goal_that_no_size_keeps_names_the_closest(goal: Goal, size: int, words: str) -> None:
    found = recommended(RUNS, goal)
    assert (found.world_size, found.keeps_goal) == (size, False) and words in found.why


def test_the_knee_is_the_last_step_that_saves_the_share_that_it_adds() -> None:
    # 64 to 128: 48 % less, 4 % more; 128 to 256: 42 % less, 15 % more; 256 to 512: 20 % less, 60 % more.
    found = recommended(RUNS, Goal())
    assert (found.world_size, found.rule) == (256, "knee")
    assert "512 devices would save 20 % of the days and add 60 % to the cost" in found.why


def test_where_every_step_pays_the_largest_size_is_said_to_have_no_knee() -> None:
    found = recommended(runs_of(d64=100.0, d128=51.0), Goal())
    assert found.world_size == 128
    assert (
        "no knee up to here" in found.why and "saves 49 % of the days and adds 2 % to the cost" in found.why
    )


def test_a_size_that_does_not_pay_is_passed_over_for_a_later_one_that_does() -> None:
    # 96: 10 % less for 35 % more; 256: 70 % less for 20 % more.
    assert recommended(runs_of(d64=100.0, d96=90.0, d256=30.0), Goal()).world_size == 256


def test_of_sizes_that_cost_the_same_the_faster_one_is_taken() -> None:
    found = recommended(runs_of(d8=2.0, d16=1.0), Goal(2.0))
    assert (found.world_size, found.rule) == (16, "deadline")


def test_one_size_and_none() -> None:
    assert recommended(runs_of(d64=3.0), Goal()).why == "it is the only size with a plan"
    assert recommend({}, Goal()) is None
    best = recommended(runs_of(d64=100.0, d128=45.0), Goal())
    assert best.world_size == 128 and best.why.startswith("no other size here is faster or cheaper; more")


def test_another_objective_decides_among_those_that_keep_the_goal() -> None:
    found = recommend(RUNS, Goal(60.0), ("memory (lowest peak)", max))
    assert found is not None and (found.world_size, found.rule) == (512, "deadline")
    found = recommend(RUNS, Goal(), ("memory (lowest peak)", min))
    assert found is not None and (found.world_size, found.rule) == (64, "objective")
    assert found.why == "it is the best by memory (lowest peak)"


@given(
    days=st.lists(st.floats(1, 1000), min_size=1, max_size=8),
    limit=st.floats(0.5, 2000),
    budget=st.floats(1e3, 1e8),
)
def test_what_is_recommended_is_on_the_front_and_keeps_what_can_be_kept(
    days: list[float], limit: float, budget: float
) -> None:
    runs = {8 * number: run_of(each, 8 * number) for number, each in enumerate(days, 1)}
    best = front(runs)
    hours = [runs[size].device_hours for size in best]
    assert hours == sorted(hours)
    assert [runs[size].days for size in best] == sorted((runs[size].days for size in best), reverse=True)
    for goal in (Goal(), Goal(limit), Goal(None, Money(budget)), Goal(limit, Money(budget))):
        found = recommended(runs, goal)
        assert found.world_size in best
        assert found.keeps_goal == any(goal.is_kept(run) for run in runs.values())
        if found.keeps_goal:
            assert goal.is_kept(runs[found.world_size])


@pytest.mark.parametrize(
    ("text", "amount", "currency", "shown"),
    [
        ("2.5", 2.5, "", "2.5"),
        (2.5, 2.5, "", "2.5"),
        ("$2.5", 2.5, "$", "$2.5"),
        ("€ 2.5", 2.5, "€", "€2.5"),
        ("2.5€", 2.5, "€", "€2.5"),
        ("2.5 eur", 2.5, "EUR", "2.5 EUR"),
        ("CHF 3", 3.0, "CHF", "3 CHF"),
        ("US$2", 2.0, "US$", "US$2"),
        ("¥400/h", 400.0, "¥", "¥400"),
        ("$2.50 per GPU-hour", 2.5, "$", "$2.5"),
        ("200k", 200_000.0, "", "200,000"),
        ("$1.2M", 1.2e6, "$", "$1.2M"),
        ("2 MXN", 2.0, "MXN", "2 MXN"),
        ("1e3 EUR", 1000.0, "EUR", "1,000 EUR"),
    ],
)
def test_money_has_the_sign_that_it_is_printed_with(
    text: str | float, amount: float, currency: str, shown: str
) -> None:
    found = parse_money("budget", text, 1e-9, 1e18, "for the whole run")
    assert found == Money(amount, currency) and str(found) == money_text(amount, currency) == shown


@pytest.mark.parametrize(
    "text",
    ["", "$", "free", "-2", "$-2", "2,5", "1,000", "2 3", "$2 EUR", "2 dollars", "0", "nan", "2kr", "1e99"],
)
def test_what_is_no_money_ends_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_money("budget", text, 1e-9, 1e18, "for the whole run")
    assert str(caught.value).startswith(
        f"budget {text}: expected money above 0 for the whole run, such as 2.5,"
    )


def test_a_run_of_one_size_keeps_its_goal_or_says_by_how_much_not() -> None:
    price = Money(1.0, "$")
    kept = verdict_line(parse_goal(60, "$200k", "1T", price), RUNS[128])
    assert kept == "goal: kept, to take at most 60 days and cost at most $200,000"
    late = verdict_line(parse_goal(55, None, "1T", None), RUNS[128])
    assert late is not None and late.endswith("55 days; one such run in ten takes more than 57.2 days")
    missed = verdict_line(parse_goal(50, 100_000, "1T", price), RUNS[128])
    assert missed is not None
    assert "missed, to take at most 50 days and cost at most $100,000: 2 days too long" in missed
    assert " and $59,744 too dear; " in missed
    assert verdict_line(Goal(), RUNS[128]) is None
