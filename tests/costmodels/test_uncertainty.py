"""The range of an estimate: which parts of a step widen it, and by how much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import StepTime, price
from costmodels.spec.engine import Spread
from costmodels.spec.table import LayoutTable
from costmodels.time.uncertainty import COMMUNICATION, spread

NONE = {**dict.fromkeys(Spread.model_fields, 0.0), "experts": None}


def step(**parts):
    """Seconds of each part of a step, as a table of one row has them."""
    return {name: np.array([parts.get(name, 0.0)]) for name in StepTime.model_fields}


@pytest.fixture
def width(cluster, engine):
    """Makes the width of one step on some devices, with constants that are zero unless given."""

    def make(time, devices=8, **constants):
        made = engine("megatron", spread={**NONE, **constants})
        whole = sum(time.values(), np.zeros(1))
        return float(spread(cluster(devices), made, time, whole)[0])

    return make


def test_the_parts_of_a_step_are_known():
    assert set(COMMUNICATION) < set(StepTime.model_fields)


def test_a_step_that_only_computes_has_the_width_of_its_engine(width):
    assert width(step(compute=3.0), base=0.1, network=1.0, launch=1.0, bubble=1.0) == pytest.approx(0.1)
    # However many nodes there are: nothing is sent.
    assert width(step(compute=3.0), devices=512, base=0.1, network=1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("part", COMMUNICATION)
def test_the_network_counts_by_its_share_and_by_doublings_of_nodes(width, part):
    time = step(**{"compute": 3.0, part: 1.0})
    within = width(time, network=0.2)
    assert within == pytest.approx(0.2 * 0.25)
    # One node, two, and sixteen.
    assert width(time, devices=16, network=0.2) == pytest.approx(2 * within)
    assert width(time, devices=128, network=0.2) == pytest.approx(5 * within)


def test_the_shares_of_launch_and_bubble_count(width):
    time = step(compute=2.0, launch=1.0, bubble=1.0)
    assert width(time, launch=0.4) == pytest.approx(0.1)
    assert width(time, bubble=0.8) == pytest.approx(0.2)


def test_narrow_models_are_wider_ranges(cluster, engine):
    made = engine("megatron", spread={**NONE, "base": 0.03, "narrow": 0.04})
    time = step(compute=1.0)
    of = [float(spread(cluster(8), made, time, np.ones(1), hidden=hidden)[0]) for hidden in (1024, 8192)]
    assert of == pytest.approx([0.05, np.hypot(0.03, 0.005)])


def test_models_with_experts_may_have_a_width_of_their_own(cluster, engine):
    time, seconds = step(compute=1.0), np.ones(1)
    for fields, expected in (({"base": 0.1}, [0.1, 0.1]), ({"base": 0.1, "experts": 0.3}, [0.1, 0.3])):
        made = engine("megatron", spread={**NONE, **fields})
        found = [
            float(spread(cluster(8), made, time, seconds, experts=experts)[0]) for experts in (False, True)
        ]
        assert found == pytest.approx(expected)


def test_independent_errors_add_in_squares(width):
    time = step(compute=1.0, data_parallel=1.0, launch=1.0, bubble=1.0)
    constants = {"base": 0.1, "network": 0.2, "launch": 0.3, "bubble": 0.4}
    alone = [width(time, **{name: value}) for name, value in constants.items()]
    assert width(time, **constants) == pytest.approx(np.sqrt(np.square(alone).sum()))


seconds = st.floats(0.0, 1e3)


@given(parts=st.lists(seconds, min_size=len(StepTime.model_fields), max_size=len(StepTime.model_fields)))
def test_a_range_is_no_narrower_than_its_base_and_has_no_unit(parts, make_width):
    time = {name: np.array([value]) for name, value in zip(StepTime.model_fields, parts, strict=True)}
    time["compute"] = time["compute"] + 1.0
    narrow, wide = make_width(time, 8), make_width(time, 512)
    assert make_width({}, 8) <= narrow <= wide
    assert make_width({name: 60 * value for name, value in time.items()}, 8) == pytest.approx(narrow)


@pytest.fixture(scope="module")
def make_width():
    """The width of a step with the usual constants on some devices, or their base of an empty one."""
    from costmodels.catalogue import load_device, load_engine
    from costmodels.spec.hardware import Cluster

    device = load_device("a100-80g")
    engine = load_engine("megatron").for_device(device)

    def make(time, devices):
        if not time:
            return engine.spread.base
        machines = Cluster(
            device=device, world_size=devices, devices_per_node=8, memory_bytes=device.memory_bytes
        )
        return float(spread(machines, engine, time, sum(time.values(), np.zeros(1)))[0])

    return make


def test_each_row_of_a_table_has_its_own_width(llama, cluster, engine, layout):
    layouts = [
        layout(llama, tp=8, dp=8, m=4),
        layout(llama, tp=8, pp=8, m=8),
        layout(llama, tp=8, pp=8, m=64),
    ]
    machines = cluster(64)
    prices = price(llama, machines, engine("megatron"), LayoutTable.of(layouts))
    found = spread(machines, prices.engine, prices.time, prices.step_time_s)
    assert found.shape == (3,)
    for row, one in enumerate(layouts):
        alone = price(llama, machines, engine("megatron"), LayoutTable.of([one]))
        expected = spread(machines, alone.engine, alone.time, alone.step_time_s)
        assert found[row] == pytest.approx(expected[0])
    # Fewer microbatches leave more of the step to the bubble.
    assert found[1] > found[2]
