"""Plans within the error of the estimate: by the chance that published pairs of steps give the slower one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodels import price
from costmodels.order import (
    KINDS,
    OrderWidths,
    apart_at,
    chance_of,
    differences,
    order_width,
    order_widths,
    widths_of,
)
from costmodels.spec.engine import Spread
from costmodels.spec.table import LayoutTable
from planner import search
from planner.ranking.ties import (
    MOST,
    are_told_apart,
    chance_to_be_faster,
    chances,
    indistinguishable,
    ties_text,
)

PROBLEM: dict[str, Any] = {"world_size": 64, "device": "a100-80g", "global_batch_size": 64}


@pytest.fixture(scope="module")
def result():
    return search("gpt-22b", engine="megatron", **PROBLEM)


def changed(result, **degrees):
    """The first layout, and the same with other degrees, as tables."""
    layout = result.plan(0).layout
    other = layout.model_copy(update=degrees)
    return LayoutTable.of([layout]), LayoutTable.of([other])


def test_differences_are_doublings_and_choices(result):
    first, other = changed(result, tensor_parallel=32, micro_batch_size=8, schedule="zbv", zero_stage=3)
    layout = result.plan(0).layout
    found = dict(zip(KINDS, differences(first, other)[:, 0], strict=True))
    assert found["run"] == 1
    assert found["tensor_parallel"] == abs(np.log2(layout.tensor_parallel / 32))
    assert found["micro_batch_size"] == abs(np.log2(layout.micro_batch_size / 8))
    assert found["chunks"] == 1 and found["sharding"] == 1
    assert found["pipeline_parallel"] == found["recompute"] == found["sequences_and_experts"] == 0
    first, other = changed(result, recompute="full", recompute_method="block", recompute_num_layers=2)
    assert dict(zip(KINDS, differences(first, other)[:, 0], strict=True))["recompute"] == 1


def test_widths_add_in_squares_and_grow_with_the_range():
    known = OrderWidths(dict.fromkeys(KINDS, 0.0) | {"run": 0.03, "tensor_parallel": 0.04}, 0.5, 0.3)
    differ = np.zeros((len(KINDS), 2))
    differ[KINDS.index("run")] = 1
    differ[KINDS.index("tensor_parallel"), 1] = 1
    assert widths_of(differ, 0.1, known) == pytest.approx([0.03, 0.05])
    assert widths_of(differ, 0.4, known) == pytest.approx([0.06, 0.10])


def test_chances_are_those_of_a_cauchy_distribution():
    apart = np.linspace(-5, 5, 11)
    # The share of numbers beyond `apart` among those that are spread evenly by angle.
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)[1:-1]
    beyond = [(np.tan(angles) > each).mean() for each in apart]
    assert chance_of(apart) == pytest.approx(beyond, abs=1e-4)
    assert [float(chance_of(np.array(apart_at(chance)))) for chance in (0.1, 0.35, 0.5)] == pytest.approx(
        [0.1, 0.35, 0.5]
    )


def test_the_criterion_is_symmetric(result):
    rows = result.places[:MOST]
    for row in rows[1:6]:
        pair = [result.prices.take(np.array([each])) for each in (rows[0], row)]
        assert order_width(*pair)[0] == pytest.approx(order_width(*reversed(pair))[0])
        forth, back = chance_to_be_faster(*pair)[0], chance_to_be_faster(*reversed(pair))[0]
        assert forth + back == pytest.approx(1)
        assert are_told_apart(*pair) == are_told_apart(*reversed(pair))


def test_the_plans_that_may_be_faster_are_counted(result):
    places, found = indistinguishable(result), chances(result)
    assert places[0] == 1 and places == tuple(sorted(places)) and 1 < len(places) <= MOST
    first = result.plan(0).estimate.tokens_per_s
    assert found[0] == 0.5
    for place in range(2, MOST + 1):
        assert (found[place - 1] >= order_widths().told_apart) == (place in places)
        faster = result.plan(place - 1).estimate.tokens_per_s > first
        assert (found[place - 1] > 0.5) == faster


def test_the_sentence_names_the_plans():
    assert ties_text(()) is None and ties_text((1,)) is None
    assert ties_text((1, 2, 3)).startswith("the first 3 plans are within the estimate's error of each other")
    assert ties_text((1, 2, 5, 7, 8, 9)).startswith(
        "plans 1, 2, 5, 7 to 9 are within the estimate's error of each other"
    )


def test_a_wider_range_never_tells_more_plans_apart():
    # The first plans of a small batch lie far apart.
    result = search("gpt-22b", engine="megatron", **PROBLEM | {"global_batch_size": 16})

    def with_spread(width):
        spread = Spread(base=width, network=width)
        return replace(result.prices, engine=result.prices.engine.model_copy(update={"spread": spread}))

    counts = [
        set(indistinguishable(replace(result, ranking=replace(result.ranking, prices=with_spread(width)))))
        for width in (0.001, 0.03, 0.3)
    ]
    assert counts[0] <= counts[1] <= counts[2] and counts[0] < counts[2]


def test_peaks_of_memory_have_no_range():
    by_memory = search("gpt-22b", objective="memory", **PROBLEM)
    assert indistinguishable(by_memory) == (1,) and chances(by_memory) == ()


def test_nothing_that_fits_is_nothing_to_tell_apart():
    kept = ["offload_activations=false", "offload_optimizer=false"]
    found = search("gpt-22b", world_size=2, global_batch_size=4, pin=kept)
    assert indistinguishable(found) == () and chances(found) == ()


def test_prices_of_other_tables_compare_too(result):
    problem = result.problem
    tables = [result.prices.take(result.places[:1]).table, result.prices.take(result.places[1:2]).table]
    pair = [price(problem.model, problem.cluster, problem.engine, table) for table in tables]
    rows = result.places[:2]
    found = order_width(result.prices.take(rows[:1]), result.prices.take(rows[1:]))
    assert order_width(*(each.simulate(np.array([0])) for each in pair))[0] == pytest.approx(found[0])
