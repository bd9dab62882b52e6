"""Data-parallel exchanges of an engine with DDP's buckets and ZeRO's shards, and the host behind rings."""

import numpy as np
import pytest

from costmodels.layers.operators import layer
from costmodels.network.collectives import group
from costmodels.spec.table import LayoutTable
from costmodels.time.data_parallel import exchange_seconds
from costmodels.time.passes import passes

LAYERS = 10


def exposed(gpt, cluster, engine, layout, parameters=1e9, **changes):
    """Seconds of ZeRO 0 and 1 on 64 devices, with no work to hide behind; every call takes 1 ms."""
    engine = engine("megatron", network_collective_latency=1e-3, devices={}, **changes)
    table = LayoutTable.of([layout(gpt, dp=64, zero=stage, gbs=64) for stage in (0, 1)])
    some, none = np.full(2, parameters), np.zeros(2)
    return exchange_seconds(cluster(64), engine, table, some, none, np.full(2, LAYERS), none, none)


def test_buckets_decide_how_many_calls_there_are(gpt, cluster, engine, layout):
    tiny = exposed(gpt, cluster, engine, layout, 64.0, network_reduction_bucket=1e6)
    # One all-reduce of the only bucket, and one call for each of ZeRO's two exchanges.
    assert tiny == pytest.approx([1e-3, 2e-3], rel=0.5)
    few, many = (exposed(gpt, cluster, engine, layout, network_reduction_bucket=size) for size in (2e9, 2e7))
    assert many[0] - few[0] == pytest.approx(99e-3, rel=0.5)
    assert many[1] == few[1]


def test_shards_cost_the_host_time_and_bandwidth(gpt, cluster, engine, layout):
    plain = exposed(gpt, cluster, engine, layout, network_reduction_bucket=1e9)
    cut = exposed(gpt, cluster, engine, layout, network_reduction_bucket=1e9, host_shard=1e-3)
    assert cut - plain == pytest.approx([0, 1e-3 * 64 * LAYERS])
    packed = exposed(
        gpt, cluster, engine, layout, network_reduction_bucket=1e9, network_sharded_efficiency=0.5
    )
    assert packed[0] == plain[0]
    assert packed[1] / plain[1] == pytest.approx(2, rel=0.1)


def test_small_reductions_end_every_step(gpt, cluster, engine, layout):
    plain, longer = (exposed(gpt, cluster, engine, layout, network_step_reductions=count) for count in (0, 3))
    # Calls of 1 ms, and the hops of a tree besides.
    assert longer - plain == pytest.approx([3e-3, 3e-3], rel=0.1)


def test_zero_may_hide_less_than_an_all_reduce(gpt, cluster, engine, layout):
    table = LayoutTable.of([layout(gpt, dp=64, zero=stage, gbs=64) for stage in (0, 1)])
    some, none, long = np.full(2, 1e9), np.zeros(2), np.full(2, 1e3)

    def seconds(**changes):
        own = engine("megatron", overlap_data_parallel=1.0, overlap_sharpness=8, devices={}, **changes)
        return exchange_seconds(cluster(64), own, table, some, none, np.full(2, LAYERS), long, long)

    assert seconds() == pytest.approx([0, 0], abs=1e-6)
    bare = seconds(overlap_sharded=0.0)
    assert bare[0] == pytest.approx(0, abs=1e-6)
    assert bare[1] > 0.01


def test_rings_between_nodes_keep_the_host_or_the_device_waiting(gpt, a100, cluster, engine, layout):
    table = LayoutTable.of([layout(gpt, tp=degree, sp=True) for degree in (8, 16)])

    def priced(**changes):
        own = engine("megatron", host_layer_overhead=1.0, devices={}, **changes)
        alone = np.ones_like(table.tensor_parallel)
        groups = {name: group(cluster(16), own, alone, alone) for name in ("cp", "ep", "etp")}
        groups["tp"] = group(cluster(16), own, table.tensor_parallel, alone)
        work = layer(gpt, own, table, "dense")
        return passes(work, a100, own, table, groups, repeats=True)

    assert priced().total == pytest.approx([2.0, 4.0], rel=1e-3)
    assert priced(host_nodes=0.0).total == pytest.approx([2.0, 2.0], rel=1e-3)
    steps = priced(host_nodes=0.0, host_tensor_parallel_step=0.25).total
    assert steps == pytest.approx([6.0, 6.0], rel=1e-3)
    waits = priced(host_nodes=0.0, network_ring_step=1.0)
    # Four collectives forward and six backward, of 16 ranks.
    assert waits.tensor_parallel == pytest.approx([0.0, 160.0], abs=0.1)
