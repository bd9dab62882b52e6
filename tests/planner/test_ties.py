"""Which plans cannot be told apart: errors that plans share cancel, those that they do not share count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodels import price
from costmodels.spec.engine import Spread
from planner import search
from planner.ranking.ties import (
    MOST,
    NOISE,
    SHAPE_SPREAD,
    half_width,
    indistinguishable,
    separation,
    ties_text,
)

PROBLEM: dict[str, Any] = {"world_size": 64, "device": "a100-80g", "global_batch_size": 64}


@pytest.fixture(scope="module")
def result():
    return search("gpt-22b", engine="megatron", **PROBLEM)


def one(result, **degrees):
    """The best row of the prices of `result` with these degrees."""
    table = result.prices.table
    mask = np.ones(len(table), dtype=bool)
    for name, value in degrees.items():
        mask &= getattr(table, name) == value
    place = next(row for row in result.places if mask[row])
    return result.prices.take(np.array([place]))


def with_spread(prices, **widths):
    return replace(prices, engine=prices.engine.model_copy(update={"spread": Spread(**widths)}))


def test_an_error_that_all_parts_have_in_common_cancels(result):
    first = one(result)
    same = replace(first, time={part: 2 * seconds for part, seconds in first.time.items()})
    assert half_width(first, same)[0] == NOISE
    assert separation(first, same)[0] == pytest.approx(np.log(2) / NOISE)


def test_links_count_by_the_share_that_the_one_waits_more(result):
    widths = {"base": 0.0, "network": 0.1, "launch": 0.0, "bubble": 0.0}
    pair = [with_spread(one(result, tensor_parallel=tp), **widths) for tp in (4, 8)]
    shares = [each.time["tensor_parallel"] / each.step_time_s for each in pair]
    others = ("pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel")
    far = [
        0.1 * 4 * (pair[1].time[p] / pair[1].step_time_s - pair[0].time[p] / pair[0].step_time_s)
        for p in others
    ]
    # Tensor parallelism of 4 and 8 stays in a node; 8 nodes widen the others fourfold.
    expected = np.sqrt((0.1 * (shares[1] - shares[0])) ** 2 + sum(each**2 for each in far))
    assert half_width(*pair)[0] == pytest.approx(expected[0], rel=1e-9)
    assert half_width(*pair)[0] > NOISE


def test_kernels_of_other_shapes_err_on_their_own(result):
    first = one(result, tensor_parallel=8)
    again = one(result, tensor_parallel=8, zero_stage=0)
    wide = [with_spread(each, base=0.5, network=0.0, launch=0.0, bubble=0.0) for each in (first, again)]
    cut = with_spread(one(result, tensor_parallel=4), base=0.5, network=0.0, launch=0.0, bubble=0.0)
    assert half_width(wide[0], cut)[0] > half_width(*wide)[0]
    kernels = [
        sum(each.time[part] for part in ("compute", "attention", "elementwise", "recompute"))
        / each.step_time_s
        for each in (wide[0], cut)
    ]
    assert half_width(wide[0], cut)[0] >= SHAPE_SPREAD * np.hypot(*kernels)[0]


def test_the_criterion_is_symmetric(result):
    rows = result.places[:MOST]
    for row in rows[1:6]:
        pair = [result.prices.take(np.array([each])) for each in (rows[0], row)]
        assert half_width(*pair)[0] == pytest.approx(half_width(*reversed(pair))[0])
        assert separation(*pair)[0] == pytest.approx(-separation(*reversed(pair))[0])


def test_the_plans_that_may_be_faster_are_counted(result):
    places = indistinguishable(result)
    rows = result.places[:MOST]
    slower = separation(result.prices.take(rows[:1]), result.prices.take(rows[1:]))
    assert places[0] == 1 and places == tuple(sorted(places)) and 1 < len(places) <= MOST
    for place in range(2, MOST + 1):
        assert (slower[place - 2] < 1) == (place in places)


def test_the_sentence_names_the_plans():
    assert ties_text(()) is None and ties_text((1,)) is None
    assert ties_text((1, 2, 3)).startswith("the first 3 plans cannot be told apart")
    assert ties_text((1, 2, 5, 7, 8, 9)).startswith("plans 1, 2, 5, 7 to 9 cannot be told apart")


def test_a_wider_range_never_tells_more_plans_apart(result):
    counts = [
        indistinguishable(replace(result, ranking=replace(result.ranking, prices=prices)))
        for prices in (with_spread(result.prices, base=base, network=base) for base in (0.0, 0.03, 0.3))
    ]
    assert set(counts[0]) < set(counts[1]) <= set(counts[2])


def test_peaks_of_memory_have_no_range():
    assert indistinguishable(search("gpt-22b", objective="memory", **PROBLEM)) == (1,)


def test_nothing_that_fits_is_nothing_to_tell_apart():
    kept = ["offload_activations=false", "offload_optimizer=false"]
    assert indistinguishable(search("gpt-22b", world_size=2, global_batch_size=4, pin=kept)) == ()


def test_prices_of_other_tables_compare_too(result):
    problem = result.problem
    tables = [result.prices.take(result.places[:1]).table, result.prices.take(result.places[1:2]).table]
    pair = [price(problem.model, problem.cluster, problem.engine, table) for table in tables]
    rows = result.places[:2]
    found = half_width(result.prices.take(rows[:1]), result.prices.take(rows[1:]))
    assert half_width(*(each.simulate(np.array([0])) for each in pair))[0] == pytest.approx(found[0])
