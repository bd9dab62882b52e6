"""Exchange of experts: the nodes of a token, what may hide it, graphs, and how full the fullest rank is."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.layers.expert_load import OF_ROUTER, load_of_layout, natural_load
from costmodels.layers.shapes import routed_rows
from costmodels.network.collectives import group
from costmodels.pricing import estimate, price
from costmodels.spec.hardware import Cluster
from costmodels.spec.model_parts import ExpertLoad, Router
from costmodels.spec.table import LayoutTable
from costmodels.time.passes import _copies_by_node


@pytest.fixture
def h800_2048() -> Cluster:
    """The machine that DeepSeek-V3 was trained on."""
    h800 = load_device("h800")
    return Cluster(device=h800, world_size=2048, devices_per_node=8, memory_bytes=h800.memory_bytes)


def routed(model, **fields):
    return model.model_copy(update={"router": model.router.model_copy(update=fields)})


def test_a_token_goes_to_the_nodes_of_the_groups_that_it_may_use(cluster, engine):
    """Eight experts of 4 of 8 groups, one group a node, as drawn and as the formula has them."""
    machine, one = cluster(64), engine("megatron")
    ep = group(machine, one, np.array([64]), 1)
    assert (ep.size / ep.local).tolist() == [8]
    nodes = 4 * (1 - (3 / 4) ** 8)
    assert _copies_by_node(ep, 8, 0.5)[0] * 8 == pytest.approx(nodes)
    assert _copies_by_node(ep, 8, 1.0)[0] * 8 == pytest.approx(8 * (1 - (7 / 8) ** 8))
    draws = np.random.default_rng(1).integers(0, 4, (20_000, 8))
    measured = np.mean([len(set(draw)) for draw in draws.tolist()])
    assert measured == pytest.approx(nodes, rel=0.01)


def test_limited_groups_make_the_exchange_of_deepseek_v3_shorter(h800_2048, layout):
    whole = load_model("deepseek-v3")
    free = routed(whole, groups=1, top_groups=1)
    engine = load_engine("megatron").with_constants({"overlap.expert_parallel": 0.0, "experts.load": 1.0})

    def exchange(model):
        rows = layout(model, pp=16, ep=64, dp=128, m=16, zero=1)
        return estimate(model, h800_2048, engine, rows).time.expert_parallel

    # 3.6 nodes instead of 5.25, of which one in eight is a token's own.
    assert exchange(whole) / exchange(free) == pytest.approx(3.6 / 5.25, rel=0.03)


@pytest.mark.parametrize(
    ("degrees", "hides"),
    [
        ({}, True),
        ({"pp": 2, "m": 4}, False),
        ({"pp": 2, "vpp": 2, "m": 4}, True),
        ({"recompute": "full"}, False),
        ({"recompute": "selective", "recompute_modules": ("mlp",)}, False),
        ({"recompute": "selective", "recompute_modules": ("activation",)}, True),
    ],
)
def test_megatron_hides_exchanges_of_chunks_that_recompute_no_experts(
    mixture, cluster, engine, layout, degrees, hides
):
    alone = mixture.model_copy(update={"shared_expert_ffn": 0, "layers": 8})
    dp = 8 // degrees.get("pp", 1)

    def exchange(share):
        one = engine("megatron", overlap_expert_parallel=share, network_efficiency=1.0)
        rows = layout(
            alone, dp=dp, ep=4, **{key: value for key, value in degrees.items() if "rec" not in key}
        )
        rows = rows.model_copy(update={key: value for key, value in degrees.items() if "rec" in key})
        return estimate(alone, cluster(8), one, rows).time.expert_parallel

    assert (exchange(0.75) < 0.5 * exchange(0.0)) == hides


def test_hidden_exchanges_take_multiprocessors_from_what_hides_them(mixture, cluster, engine, layout):
    alone = mixture.model_copy(update={"shared_expert_ffn": 0})

    def exchange(share, cores):
        constants = {
            "overlap_expert_parallel": share,
            "experts_dispatch_cores": cores,
            "network_efficiency": 1.0,
        }
        one = engine("megatron", **constants)
        return estimate(alone, cluster(16), one, layout(alone, dp=16, ep=8)).time.expert_parallel

    whole = exchange(0.0, 20)
    assert whole == exchange(0.0, 0)
    # An A100 has 108 of them.
    assert exchange(0.9, 20) == pytest.approx(whole * (0.1 + 0.9 * 20 / 108))


def test_graphs_of_its_parts_take_their_share_of_the_launches_of_a_layer_with_experts(
    mixture, cluster, engine, layout
):
    def launch(model, graphed):
        one = engine("megatron", host_graphed=graphed, host_layer_overhead=1.0, host_kernel_gaps=0.0)
        return estimate(model, cluster(8), one, layout(model, dp=8)).time.launch

    whole = mixture.model_copy(update={"mlp_pattern": ("experts",), "first_dense_layers": 0})
    assert launch(whole, 0.75) == pytest.approx(0.25 * launch(whole, 0.0), rel=0.02)


def test_experts_with_a_capacity_are_exchanged_by_all_to_all(mixture, cluster, engine, layout):
    limited = routed(mixture, capacity_factor=1.0)

    def exchange(**constants):
        one = engine("megatron", experts_load=1.0, **constants)
        return estimate(limited, cluster(16), one, layout(limited, dp=16, ep=16)).time.expert_parallel

    assert exchange(experts_dispatch_rate=2.0, experts_dispatches_by_node=True) == exchange()


def test_natural_routing_fills_the_fullest_rank_as_normal_loads_do(mixture, layout):
    """The load of the fullest rank is the largest mean of so many drawn loads."""
    model = mixture.model_copy(update={"experts": 256, "top_k": 8})
    rng = np.random.default_rng(0)
    # 256 experts, 8 of a token, 32 sequences at a time.
    width = np.sqrt((256 / 8 - 1) * (1 / OF_ROUTER["bias"] + 1 / 31 / 32))
    table = LayoutTable.of([layout(model, dp=32, ep=32)])
    loads = 1 + width * rng.standard_normal((4000, 32, 8))
    drawn = loads.mean(-1).max(-1).mean()
    assert natural_load(routed(model, expert_bias=True, score="sigmoid"), table)[0] == pytest.approx(
        drawn, rel=0.01
    )


def test_loads_grow_with_ranks_of_few_experts_and_shrink_with_balancing_and_sequences(mixture, layout):
    model = mixture.model_copy(update={"experts": 64, "top_k": 4})

    def load(spec=model, **degrees):
        return natural_load(spec, LayoutTable.of([layout(spec, **{"dp": 32, "ep": 8, **degrees})]))[0]

    assert load(ep=1) == 1 < load(ep=2) < load() < load(ep=32)
    assert load(mbs=4) < load()
    assert load(routed(model, expert_bias=True, score="sigmoid")) < load() < load(routed(model, early=True))
    # A router that uses all experts uses them evenly.
    assert load(model.model_copy(update={"experts": 8, "top_k": 8})) == 1


def test_what_is_said_of_loads_comes_before_natural_routing(mixture, engine, layout):
    one = layout(mixture, dp=8, ep=8)
    natural = load_of_layout(mixture, engine("megatron", experts_load=None), one)
    assert natural > 1
    said = routed(mixture, loads=(ExpertLoad(ranks=1, mean=1.7, peak=1.7),))
    assert load_of_layout(said, engine("megatron", experts_load=None), one) == 1.7
    assert load_of_layout(mixture, engine("megatron", experts_load=1.0), one) == 1
    assert load_of_layout(routed(mixture, capacity_factor=1.0), engine("megatron"), one) == 1
    rows = routed_rows(mixture, LayoutTable.of([one]))
    assert rows == pytest.approx(natural * routed_rows(mixture, LayoutTable.of([one]), 1.0))


def test_gatherings_ahead_hide_the_hops_of_rings(mixture, cluster, engine, layout):
    """Each device moves as much on twice as many nodes, of states that are sharded twice as far."""

    def seconds(nodes, **constants):
        one = engine("megatron", network_efficiency=1.0, **constants)
        rows = layout(mixture, dp=8 * nodes, zero=3)
        table = LayoutTable.of([rows])
        return price(mixture, cluster(8 * nodes), one, table).time["data_parallel"][0]

    one_by_one, ahead = (
        seconds(64, **overlap) - seconds(8, **overlap)
        for overlap in (
            {"overlap_data_parallel": 0.0, "overlap_gathered": None},
            {"overlap_data_parallel": 0.0, "overlap_gathered": 0.0},
        )
    )
    assert 0 < ahead < 0.5 * one_by_one


def test_routers_are_read_back_as_they_were(mixture):
    assert Router.model_validate(Router(early=True).model_dump()).early


def test_own_layout_of_deepseek_v3_takes_what_it_took(h800_2048, layout):
    """180,000 H800 hours a trillion tokens (arXiv:2412.19437, table 1), 15,360 sequences a step."""
    model = load_model("deepseek-v3")
    taken = 180e3 * 3600 * 15360 * 4096 / 1e12 / 2048
    for engine in ("megatron", "nemo"):
        rows = layout(model, pp=16, vpp=2, ep=64, dp=128, m=128, zero=1, precision="fp8")
        found = estimate(model, h800_2048, load_engine(engine), rows).step_time_s * 15360 / (128 * 128)
        assert 0.75 < found / taken < 1.25
