"""Several world sizes: which of them are planned, and the front of time against cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from costmodels.errors import InputError, NoLayoutFits
from planner import Sizes, advice, search
from planner.budget.goodput import Failures
from planner.world_sizes import Size, no_size_fits, parse_world_sizes
from tests.support.models import TINY


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64..512", (64, 96, 128, 192, 256, 384, 512)),
        ("1..32", (1, 2, 4, 8, 16, 24, 32)),
        ("40..72", (40, 48, 64, 72)),
        ("60..100", (64, 96)),
        ("3..9", (4, 8)),
        ("64,128,96,64", (64, 96, 128)),
        ("7, 100", (7, 100)),
        ("8,64..96", (8, 64, 96)),
        ("64..64", (64,)),
        (64, (64,)),
        ([128, 64], (64, 128)),
        (range(8, 25, 8), (8, 16, 24)),
        (np.int64(64), (64,)),
        (np.array([128, 64]), (64, 128)),
    ],
)
def test_ranges_hold_whole_nodes_in_steps_and_lists_what_they_say(text: Any, sizes: tuple[int, ...]) -> None:
    assert parse_world_sizes(text, 8) == sizes


@given(low=st.integers(1, 5000), more=st.integers(0, 5000), per_node=st.sampled_from([1, 2, 4, 8, 16]))
def test_every_size_of_a_range_is_in_it_and_fills_nodes(low: int, more: int, per_node: int) -> None:
    try:
        sizes = parse_world_sizes(f"{low}..{low + more}", per_node)
    except InputError:
        # Between two multiples of a node there may be none.
        assert all(size % per_node and per_node % size for size in (low, low + more))
        return
    assert list(sizes) == sorted(set(sizes))
    for size in sizes:
        assert low <= size <= low + more
        assert size % per_node == 0 or per_node % size == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("512..64", "world_size 512..64: expected the smaller end first, 64..512"),
        ("9..15", "world_size 9..15: no whole nodes of 8 devices, or divisors of one, in it"),
        ("64,", "world_size 64,: '' is not a number of devices; expected 64, 64,128,256 or 64..512"),
        ("64..", "world_size 64..: '' is not a number of devices"),
        ("a..b", "world_size a..b: 'a' is not a number of devices"),
        ("1..2..4", "world_size 1..2..4: '2..4' is not a number of devices"),
        ("0,8", "world_size 0,8: '0' is not a number of devices"),
        ("8,99999999999", "world_size 8,99999999999: '99999999999' is not a number of devices"),
        ([], "world_size: 0 sizes; expected 1 to 64"),
        (range(1, 80), "world_size: 79 sizes; expected 1 to 64"),
        (0, "world_size [0]: '0' is not a number of devices"),
        (
            "1..16777216",
            "world_size 1..16777216: '16777216' is not a number of devices",
        ),
        (8.0, "world_size 8.0: expected 64, 64,128,256 or 64..512"),
        ([8.0], "world_size [8.0]: '8.0' is not a number of devices"),
        (None, "world_size None: expected 64, 64,128,256 or 64..512"),
    ],
)
def test_wrong_world_sizes_end_in_one_line(text: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_world_sizes(text, 8)
    assert str(caught.value).startswith(line)


def sizes_of(world_size: Any = "16..128", **arguments: Any) -> Sizes:
    job = {"device": "h100", "global_batch_size": 128, "tokens": "1T"}
    return planner.sizes("llama3-8b", world_size=world_size, **{**job, **arguments})


@pytest.fixture(scope="module")
def found() -> Sizes:
    return sizes_of()


@pytest.mark.slow
def test_each_size_has_the_plan_of_its_own_search(found: Sizes) -> None:
    assert [size.world_size for size in found.sizes] == [16, 24, 32, 48, 64, 96, 128]
    for size in found.sizes:
        alone = search("llama3-8b", world_size=size.world_size, device="h100", global_batch_size=128).best
        assert alone is not None and size.plan is not None and size.run is not None
        assert size.plan.layout == alone.layout
        assert size.run == alone.run("1T")


@pytest.mark.slow
def test_the_front_is_what_no_other_size_beats_in_time_and_cost(found: Sizes) -> None:
    points = {size.world_size: (size.run.days, size.run.device_hours) for size in found.sizes if size.run}
    front = [size.world_size for size in found.front]
    for world, (days, hours) in points.items():
        better = [
            other
            for other in points
            if other != world and points[other][0] <= days and points[other][1] <= hours
        ]
        assert (world in front) == (not better)
    assert 1 < len(front) < len(points)


@pytest.mark.parametrize(
    "objective",
    ["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("step-time", "cost"))],
)
def test_the_chosen_size_is_best_by_the_objective(objective: str) -> None:
    found = sizes_of("16..64", objective=objective)
    figures = {
        size.world_size: {
            "step-time": size.plan.estimate.step_time_s,
            "cost": -size.plan.estimate.tokens_per_s_per_device,
            "memory": round(math.log(size.plan.estimate.peak_memory_bytes), 3),
        }[objective]
        for size in found.sizes
        if size.plan is not None
    }
    assert found.chosen is not None and found.chosen.plan is not None
    assert found.chosen.world_size == min(figures, key=lambda world: figures[world])
    assert found.chosen.plan.objective == objective


def test_of_sizes_whose_peaks_are_equal_the_one_with_most_tokens_per_second_is_chosen(found: Sizes) -> None:
    def with_peak(size: Size, share: float) -> Size:
        assert size.plan is not None
        estimate = size.plan.estimate
        cost = estimate.model_copy(update={"peak_memory_bytes": share * 1e9})
        return replace(size, plan=size.plan.model_copy(update={"estimate": cost}))

    small, *_, large = found.sizes
    assert small.run is not None and large.run is not None and large.run.days < small.run.days
    for share, chosen in ((1.0, large), (1.0001, large), (1.01, small)):
        pair = (with_peak(small, 1.0), with_peak(large, share))
        picked = Sizes(pair, "memory", None).chosen
        assert picked is not None and picked.world_size == chosen.world_size


def test_a_size_that_adds_more_to_the_cost_than_it_saves_of_the_days_is_not_recommended() -> None:
    # With a graph one device is as fast as eight.
    plain: dict[str, Any] = {"world_size": "1,8", "global_batch_size": 8, "pin": "cuda_graphs=false"}
    found = planner.sizes(TINY, **plain, prefer="fastest")
    one, eight = (size.run for size in found.sizes)
    assert one is not None and eight is not None and eight.days < one.days
    assert eight.device_hours / one.device_hours - 1 > 1 - eight.days / one.days
    assert found.recommendation is not None and found.recommendation.rule == "knee"
    assert found.chosen is found.sizes[0] and found.chosen in found.front
    # A deadline chooses the larger size all the same.
    days = (one.days + eight.days) / 2
    job = plain | {"tokens": 10**9, "prefer": "fastest"}
    hurried = planner.sizes(TINY, **job, deadline_days=days)
    assert hurried.recommendation is not None and hurried.recommendation.rule == "deadline"
    assert hurried.chosen is hurried.sizes[1] and hurried.plan is not None
    assert hurried.plan.asked is not None and hurried.plan.asked.deadline_days == days
    assert [size.world_size for size in hurried.plan.asked.sizes] == [1, 8]


HELD: dict[str, Any] = {"device": "h100", "global_batch_size": 64, "pin": ["offload_optimizer=false"]}
"""A job that keeps all on its devices."""


def test_a_size_where_nothing_fits_or_is_legal_is_listed_with_the_reason() -> None:
    found = planner.sizes("llama2-70b", world_size="8,12,64", **HELD)
    small, odd, large = found.sizes
    assert (small.plan, small.run, small.on_front) == (None, None, False)
    assert small.problem is not None and small.problem.startswith("needs ") and "lacks" in small.problem
    assert odd.problem is not None and "world size 12 is not a multiple of local world size 8" in odd.problem
    assert odd.result is None
    assert large.plan is not None and large.problem is None and large.on_front
    assert found.chosen is large
    assert large.run is not None and large.run.tokens == 10**9


def test_advice_is_asked_for_at_most_once_where_a_smaller_size_is_legal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(problem: object) -> None:
        pytest.fail("sizes nearby were looked for")

    monkeypatch.setattr(advice, "no_legal_layout", never)
    found = planner.sizes(TINY, world_size="8,4096", global_batch_size=8, memory_margin_gib=1, pin="cp=1")
    small, large = found.sizes
    assert small.plan is not None and small.plan.cluster.memory_margin_bytes == 2**30
    assert large.plan is None and large.problem is not None
    assert large.problem.startswith("no layout is legal on 4096 devices with global_batch_size 8: ")


def test_sizes_after_the_first_keep_all_of_the_cluster() -> None:
    job: dict[str, Any] = {"device": "h100", "global_batch_size": 64, "device_memory_gib": 70.0}
    job |= {"inter_node_gbps": 100.0, "nics_per_node": 4, "memory_margin_gib": 2.0, "pin": "tp=2"}
    for size in planner.sizes("gpt2-124m", world_size="8,16,32", forbid="zero=3", **job).sizes:
        alone = search("gpt2-124m", world_size=size.world_size, forbid="zero=3", **job)
        assert size.result is not None and size.result.problem == alone.problem
        assert size.plan == alone.best


@pytest.mark.slow
def test_where_nothing_fits_the_error_is_that_of_the_largest_size() -> None:
    found = planner.sizes("llama2-70b", world_size="2,4", **HELD)
    assert found.chosen is None and found.front == ()
    error = no_size_fits(found)
    assert isinstance(error, NoLayoutFits)
    assert "no layout of llama2-70b fits 4 x h100" in str(error)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"model": "gpt-99b"}, "unknown model 'gpt-99b'"),
        ({"device": "a1000"}, "unknown device 'a1000'"),
        ({"local_world_size": 0}, "local_world_size 0: expected a whole number of at least 1"),
        ({"global_batch_size": None}, "give global_batch_size or max_global_batch_size"),
        ({"objective": "speed"}, "objective speed: expected one of"),
        ({"tokens": "many"}, "tokens many: expected a number"),
        ({"price_per_hour": -1.0}, "price_per_hour -1: expected money above 0"),
        ({"price_per_hour": "-2"}, "price_per_hour -2: expected money above 0"),
        ({"price_per_hour": "2,5"}, "price_per_hour 2,5: expected money above 0"),
        ({"deadline_days": 3}, "deadline_days 3: also give tokens"),
        ({"deadline_days": 0, "tokens": "1T"}, "deadline_days 0: expected days above 0"),
        ({"budget": 3, "tokens": "1T"}, "budget 3: also give price_per_hour"),
        ({"budget": "3", "price_per_hour": 2}, "budget 3: also give tokens"),
        (
            {"budget": "$3", "price_per_hour": "€2", "tokens": "1T"},
            "budget $3: in $, and price_per_hour is in €",
        ),
        ({"local_world_size": 8.0}, "local_world_size 8.0: expected a whole number"),
        ({"world_size": "12,20"}, "world size 12 is not a multiple of local world size 8"),
        ({"failures": Failures(1e-6)}, "mtbf_hours 1e-06 of 8 devices: one fails every"),
    ],
)
def test_what_is_wrong_with_every_size_ends_in_one_line(arguments: dict[str, Any], line: str) -> None:
    job: dict[str, Any] = {"model": TINY, "world_size": "8,16", "global_batch_size": 16}
    with pytest.raises(InputError) as caught:
        planner.sizes(**{**job, **arguments})
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_failures_count_in_days_and_may_stop_the_large_sizes_only() -> None:
    plain, failing = sizes_of("16,128"), sizes_of("16,128", failures=Failures(2_000.0))
    for one, other in zip(plain.sizes, failing.sizes, strict=True):
        assert one.run is not None and other.run is not None and other.run.goodput is not None
        assert other.run.days == pytest.approx(one.run.days / other.run.goodput.share)
    small, large = sizes_of("16,128", failures=Failures(8.0, restart_seconds=2400.0)).sizes
    assert small.plan is not None
    assert large.plan is None and large.run is None
    assert large.problem is not None and large.problem.startswith("mtbf_hours 8 of 128 devices: ")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    worlds=st.lists(st.sampled_from([1, 2, 4, 8, 16, 24]), min_size=1, max_size=4), price=st.floats(0.1, 9)
)
def test_a_price_scales_the_front_and_moves_nothing(worlds: list[int], price: float) -> None:
    job: dict[str, Any] = {"world_size": worlds, "max_global_batch_size": 48}
    plain, priced = planner.sizes(TINY, **job), planner.sizes(TINY, **job, price_per_hour=price)
    assert [size.on_front for size in plain.sizes] == [size.on_front for size in priced.sizes]
    for size in priced.sizes:
        assert size.run is not None and size.run.money == pytest.approx(size.run.device_hours * price)
