"""Days and money of a training run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from costmodels.memory.checkpoints import checkpoint_bytes
from planner import suggest
from planner.budget.goodput import Failures, Stored, goodput
from planner.budget.run import parse_tokens
from tests.support.models import TINY

DAY = 86400.0
PLAN = suggest(TINY, world_size=8, global_batch_size=16)


@settings(max_examples=100, deadline=None)
@given(tokens=st.integers(1, 10**17), price=st.floats(0.01, 100))
def test_days_are_tokens_over_tokens_per_second_and_money_is_device_hours(tokens: int, price: float) -> None:
    plan = PLAN
    run = plan.run(tokens, price)
    assert run.days == pytest.approx(tokens / plan.estimate.tokens_per_s / DAY)
    assert run.device_hours == pytest.approx(run.days * 24 * 8)
    assert run.money == pytest.approx(run.device_hours * price)
    low, high = plan.estimate.step_time_low_s, plan.estimate.step_time_high_s
    assert run.days_low / run.days == pytest.approx(low / plan.estimate.step_time_s)
    assert run.days_high / run.days == pytest.approx(high / plan.estimate.step_time_s)
    assert run.money_low is not None and run.money_high is not None and run.money is not None
    assert run.money_low < run.money < run.money_high
    assert (run.steps - 1) * 16 * 128 < tokens <= run.steps * 16 * 128


def test_without_a_price_there_is_no_money_and_without_failures_no_goodput() -> None:
    run = PLAN.run("300B")
    assert run.tokens == 300 * 10**9
    assert run.money is run.money_low is run.money_high is run.goodput is None


def test_failures_take_their_share_of_days_and_money() -> None:
    failures = Failures(100.0, checkpoint_gbps=1.0)
    plain, failing = PLAN.run(10**12, 2.0), PLAN.run(10**12, 2.0, failures)
    held = checkpoint_bytes(PLAN.model, PLAN.cluster, PLAN.engine, PLAN.layout)
    # Under FSDP2 without ZeRO every replica reads the whole checkpoint.
    read = held * 8 / PLAN.layout.zero_shards / PLAN.layout.tensor_parallel
    share = goodput(PLAN.cluster, PLAN.estimate.step_time_s, Stored(held, read, 0.0), failures).share
    assert failing.goodput is not None and 0.5 < share < 1
    for name in ("days", "days_low", "days_high", "device_hours", "money", "money_low", "money_high"):
        assert getattr(failing, name) == pytest.approx(getattr(plain, name) / share)
    assert failing.steps == plain.steps


def test_llama_3_405b_takes_about_the_device_hours_of_its_model_card() -> None:
    """30.84 million H100 hours for 15.6 T tokens, longer sequences and failures included."""
    plan = suggest("llama3-405b", world_size=16384, device="h100", global_batch_size=2048)
    run = plan.run("15.6T", failures=Failures(50_700))
    assert run.days_low < 30.84e6 / 16384 / 24 < run.days_high
    assert run.device_hours == pytest.approx(30.84e6, rel=0.25)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1e12", 10**12),
        ("15T", 15 * 10**12),
        ("15.6t", 15_600 * 10**9),
        ("300B", 300 * 10**9),
        (" 2.5 b ", 2_500_000_000),
        ("10M", 10**7),
        ("4k", 4000),
        ("1", 1),
        (10**12, 10**12),
        (2**55 + 1, 2**55 + 1),
        (1e12, 10**12),
    ],
)
def test_tokens_are_numbers_with_or_without_a_suffix(text: Any, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "15X", "-1B", "0", "nan", "inf", "1e19", "1,000", "0.2", "1 2"])
def test_what_is_no_number_of_tokens_ends_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        PLAN.run(text)
    assert str(caught.value).startswith(f"tokens {text}: expected a number such as 1e12, 300B or 15T")


@pytest.mark.parametrize("price", [0.0, -2.0, math.nan, math.inf, 1e308, 10**400, "-2", "", "2 3", [2.0]])
def test_what_is_no_price_ends_in_one_line(price: Any) -> None:
    with pytest.raises(InputError, match=r"^price_per_hour .*: expected money above 0 for a device and hour"):
        PLAN.run("1B", price)


def test_the_largest_numbers_are_still_counted() -> None:
    run = PLAN.run(1e18, 1e9, Failures(1e9, 1e9, 0.0))
    assert run.money_high is not None and math.isfinite(run.money_high)
    assert run.goodput is not None and 0.999 < run.goodput.share < 1
    slow = PLAN.model_copy(update={"cluster": PLAN.cluster.model_copy(update={"world_size": 2**20})})
    with pytest.raises(InputError, match="one fails every"):
        slow.run(1e18, 1e-9, Failures(1e-9, 1e-9, 1e9))


def test_numbers_of_other_libraries_are_numbers() -> None:
    failures = Failures(np.float64(500), np.int64(80), np.int64(60))  # type: ignore[arg-type]
    run = PLAN.run(np.int64(10**12), np.float32(2.0), failures)  # type: ignore[arg-type]
    assert run == PLAN.run(10**12, 2.0, Failures(500.0, 80.0, 60.0))
