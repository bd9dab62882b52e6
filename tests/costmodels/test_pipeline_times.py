"""Pipelines of priced layouts, simulated: one number in prices, estimates and timelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costmodels import estimate, price
from costmodels.pipeline_times import stage_seconds
from costmodels.spec.table import LayoutTable
from costmodels.time.simulation import StageSeconds
from costmodels.timeline import timeline

SHAPES: list[dict[str, Any]] = [
    {"tp": 4, "pp": 4, "dp": 4, "m": 12},
    {"tp": 2, "pp": 8, "dp": 4, "m": 9, "layers_per_stage": (3, 2, 2, 2, 2, 2, 2, 1)},
    {"tp": 2, "sp": True, "pp": 4, "vpp": 4, "dp": 8, "m": 8, "recompute": "full"},
    {"tp": 4, "pp": 4, "vpp": 2, "dp": 4, "m": 16, "schedule": "interleaved_zb"},
    {"pp": 4, "vpp": 2, "dp": 16, "m": 8, "schedule": "zbv", "layers_per_stage": (3, 2, 2, 2, 2, 2, 2, 1)},
    {"pp": 8, "vpp": 2, "dp": 8, "m": 20, "schedule": "dualpipev"},
    {
        "pp": 8,
        "dp": 8,
        "m": 16,
        "recompute": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
]


@pytest.fixture
def layouts(mixture, layout):
    return [layout(mixture, **fields) for fields in SHAPES]


@pytest.fixture
def prices(mixture, cluster, engine, layouts):
    return price(mixture, cluster(64), engine("megatron"), LayoutTable.of(layouts))


@pytest.mark.parametrize("name", ["bundled", "megatron"])
def test_stages_add_up_to_their_ranks(name, mixture, cluster, engine, layouts):
    """The work of the slowest rank, once from its stages and once as `price` has it."""
    table, constants = LayoutTable.of(layouts), engine(name).for_device(cluster(64).device)
    found = price(mixture, cluster(64), engine(name), table)
    idle = ("bubble", "pipeline_parallel", "data_parallel", "optimizer", "accumulation")
    for row, seconds in enumerate(stage_seconds(mixture, cluster(64), constants, table)):
        assert isinstance(seconds, StageSeconds)
        one = layouts[row]
        assert len(seconds.forward) == len(one.layers_per_stage) == len(seconds.send) + 1
        work = sum(values[row] for part, values in found.time.items() if part not in idle)
        slowest = one.micro_batches * seconds.slowest_rank(one.schedule, one.pipeline_parallel)
        # Gradients of each microbatch are added up in the backward pass; what is once a step is not.
        # Megatron's GEMMs add theirs, so that nothing is left on ranks without an embedding.
        added = slowest > work or (name == "megatron" and slowest == pytest.approx(work, rel=1e-12))
        assert added and slowest < work + max(2 * found.time["accumulation"][row], 0.05 * work)


def test_first_and_last_stage_have_embedding_and_head(mixture, cluster, engine, layout):
    one = layout(mixture, pp=8, dp=8, m=8)
    [seconds] = stage_seconds(
        mixture, cluster(64), engine("megatron").for_device(cluster(64).device), LayoutTable.of([one])
    )
    assert seconds.forward[0] != seconds.forward[1]  # The first two layers are dense.
    assert seconds.forward[1:-1] == pytest.approx(np.full(6, seconds.forward[1]))
    for times in (seconds.forward, seconds.inputs):
        assert times[-1] > 1.1 * times[1]


def test_the_timeline_is_as_long_as_the_estimate_says(mixture, cluster, engine, layouts, prices):
    for row, one in enumerate(layouts):
        found = timeline(mixture, cluster(64), engine("megatron"), one)
        cost = prices.estimate(row)
        untied = cost.time.pipeline_parallel  # The mixture ties nothing.
        busy = max(found.busy_s)
        assert found.seconds == pytest.approx(busy + cost.time.bubble + untied)
        assert cost.time.total == pytest.approx(cost.step_time_s)
        assert cost.time.total > found.seconds


def test_simulated_rows_are_what_estimates_hold(mixture, cluster, engine, layouts, prices):
    rows = np.array([4, 0, 2])
    assert not prices.simulated.any()
    some = prices.simulate(rows)
    assert some.simulated.tolist() == [True, False, True, False, True, False, False]
    for row, one in enumerate(layouts):
        alone = estimate(mixture, cluster(64), engine("megatron"), one)
        for found in (some.estimate(row), prices.estimate(row)):
            assert found.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
            assert found.mfu == pytest.approx(alone.mfu, rel=1e-12)
        if row in rows:
            assert some.step_time_s[row] == pytest.approx(alone.step_time_s, rel=1e-12)
        else:
            assert some.step_time_s[row] == prices.step_time_s[row]


def test_closed_forms_and_simulation_are_close(prices):
    """Even with a head of more than a layer, uneven stages and slow links."""
    exact = prices.simulate(np.arange(len(prices)))
    assert prices.step_time_s == pytest.approx(exact.step_time_s, rel=0.04)
    assert (prices.step_time_s != exact.step_time_s).any()
    for part in prices.time:
        if part not in ("bubble", "pipeline_parallel"):
            assert (prices.time[part] == exact.time[part]).all()


def test_one_pipeline_rank_needs_no_simulation(mixture, cluster, engine, layout):
    prices = price(
        mixture, cluster(64), engine("megatron"), LayoutTable.of([layout(mixture, tp=8, dp=8, m=4)])
    )
    assert prices.simulated.tolist() == [True]
    again = prices.simulate(np.array([0]))
    assert again.time["bubble"].tolist() == again.time["pipeline_parallel"].tolist() == [0.0]


def test_schedules_that_no_runtime_plays_keep_their_closed_form(mixture, cluster, engine, layout):
    one = layout(mixture, pp=4, vpp=2, dp=16, m=9)
    prices = price(mixture, cluster(64), engine("megatron"), LayoutTable.of([one]))
    again = prices.simulate(np.array([0]))
    assert again.simulated.tolist() == [False]
    assert again.step_time_s.tolist() == prices.step_time_s.tolist()
    assert prices.estimate(0).step_time_s == prices.step_time_s[0]
