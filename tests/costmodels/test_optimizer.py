"""Bytes and seconds of optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import planner
from costmodels import ModelSpec
from costmodels.catalogue import load_device
from costmodels.errors import InputError
from costmodels.layers.optimizer import newton_schulz_flops, newton_schulz_rate
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import unit_sizes
from costmodels.pricing import estimate
from costmodels.ranks.rank_layers import all_ranks, ranks_entry
from costmodels.spec.layout import Layout, MuonMode
from costmodels.spec.table import LayoutTable
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import resolve_engine

KINDS = ("adam", "sgd", "adafactor", "muon", "adam8bit", "came")


def held(model, cluster, engine, layout):
    table = LayoutTable.of([layout])
    ranks = all_ranks(*ranks_entry(model, table, 0)).each(lambda each: each[None, :])
    return stage_memory(cluster, engine, table, unit_sizes(model, engine, table), ranks)["optimizer"].sum()


def test_states_are_those_of_the_optimizers(gpt, cluster, engine, layout):
    bytes_of = {kind: held(gpt, cluster(1), engine("bundled"), layout(gpt, optimizer=kind)) for kind in KINDS}
    n = gpt.parameters
    layers = gpt.layers * gpt.dense_layer_parameters
    assert bytes_of["adam"] == 12 * n
    assert bytes_of["sgd"] == 8 * n
    # Adam for embedding and head.
    assert bytes_of["muon"] == 8 * layers + 12 * (n - layers)
    assert bytes_of["adam8bit"] == pytest.approx((4 + 2 + 8 / 256) * n)
    assert 4 * n < bytes_of["adafactor"] < 4.1 * n
    # The momentum, and two means for each row and each column of Adafactor's one.
    assert bytes_of["came"] - bytes_of["sgd"] == pytest.approx(2 * (bytes_of["adafactor"] - 4 * n))


def test_zero_shards_the_states_and_offloading_takes_them_along(gpt, cluster, engine, layout):
    for kind in KINDS:
        whole, shard, away = (
            held(gpt, cluster(8), engine("bundled"), layout(gpt, dp=8, optimizer=kind, **fields))
            for fields in ({}, {"zero": 1}, {"zero": 1, "offload_optimizer": True})
        )
        assert whole == pytest.approx(8 * shard)
        assert away == 0


def test_less_state_is_less_traffic(gpt, cluster, engine, layout):
    def seconds(kind, **fields):
        one = layout(gpt, dp=8, optimizer=kind, **fields)
        return estimate(gpt, cluster(8), engine("bundled"), one).time.optimizer

    assert seconds("adam8bit") < seconds("sgd") < seconds("adam")
    assert seconds("sgd") < seconds("came")
    assert seconds("sgd") == pytest.approx(20 / 28 * seconds("adam"))


def test_muon_makes_whole_matrices_orthogonal_on_every_rank(gpt, a100, cluster, engine, layout):
    plain = engine("bundled", gemm_efficiency=1.0, network_efficiency=1.0, devices={})

    def more(size, **degrees):
        muon, sgd = (
            estimate(gpt, cluster(size), plain, layout(gpt, optimizer=kind, **degrees)).time.optimizer
            for kind in ("muon", "sgd")
        )
        return muon - sgd

    h, layers = gpt.hidden, gpt.layers * gpt.dense_layer_parameters
    square, wide = 5 * 6 * h**3, 5 * (4 * 4 * h * h**2 + 2 * h**3)
    per_parameter = (4 * square + 2 * wide) / (12 * h * h)
    assert newton_schulz_flops(gpt) == pytest.approx(per_parameter)
    alone = more(1)
    assert alone == pytest.approx(layers * per_parameter / a100.peak_flops["bf16"])
    # ZeRO and tensor parallelism spare no product, and gather the momentum.
    assert more(8, dp=8, zero=1) == pytest.approx(alone + layers * 2 * 7 / 8 / 300e9, rel=0.01)
    assert more(8, tp=8) > alone


def test_muon_shares_out_whole_experts(mixture, a100, cluster, engine, layout):
    free = a100.model_copy(update={"intra_node": a100.intra_node.model_copy(update={"bandwidth": 1e18})})
    machine = cluster(8).model_copy(update={"device": free})

    def more(**degrees):
        muon, sgd = (
            estimate(
                mixture, machine, engine("bundled"), layout(mixture, dp=8, zero=1, optimizer=kind, **degrees)
            )
            for kind in ("muon", "sgd")
        )
        return muon.time.optimizer - sgd.time.optimizer

    assert more(ep=8) == pytest.approx(more(ep=2), rel=1e-3)
    # Sixteen experts on eight ranks, and all of one rank's without ZeRO.
    assert more(ep=1) == pytest.approx(more(ep=8), rel=1e-3)


def test_muon_runs_in_bf16_only_where_there_is_bf16():
    assert "bf16" not in load_device("ascend-910").peak_flops
    assert newton_schulz_rate(load_device("ascend-910")) == 256e12


def test_muons_modes_share_out_the_products_of_newton_schulz(gpt):
    h = gpt.hidden

    def steps(n, m):
        """Five steps of X X^T, A A and B X for a matrix of m rows and n columns."""
        return 5 * (2 * m * n * m + 2 * m * m * m + 2 * m * m * n)

    # 4 x [h, h] of attention, [4 h, h] and [h, 4 h], over 4 ranks.
    matrices = 12 * h * h
    whole = 4 * steps(h, h) + 2 * steps(4 * h, h)
    parts: dict[MuonMode, float] = {
        "duplicated": whole,
        "layer_sharded": whole / 4,
        # Matrices [h, h / 4] with h rows, and [h, h] with h.
        "distributed": 4 * steps(h / 4, h) + 2 * steps(h, h),
        # Matrices [h, h / 4] with h / 4 rows, and [h, h].
        "blockwise": 4 * steps(h, h / 4) + 2 * steps(h, h),
    }
    for mode, flops in parts.items():
        assert newton_schulz_flops(gpt, mode, np.array([4.0])) * matrices == pytest.approx(flops), mode


@pytest.mark.parametrize("zero", [0, 1])
def test_megatrons_ways_of_muon_are_as_fast_as_measured_in_order(zero):
    """NVIDIA/Megatron-LM issue 6676: 632, 356 and 157 ms of duplicated, distributed and layer-sharded Muon.

    They are of 32 GB300, where 16 ranks split dense matrices and 2 those of experts; here 8 ranks split all.
    """
    model = ModelSpec(
        name="m", layers=16, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, vocab=32000, seq=4096
    )
    machine = resolve_cluster("gb300", 32, local_world_size=32)
    engine = resolve_engine("megatron", machine.device)
    times = {}
    for mode in ("default", "duplicated", "distributed", "layer_sharded", "blockwise"):
        one = Layout(
            tensor_parallel=8,
            data_parallel=4,
            zero_stage=zero,
            global_batch_size=4,
            layers_per_stage=(16,),
            optimizer="muon",
            muon_mode=mode,
        )
        times[mode] = estimate(model, machine, engine, one).time.optimizer
    sgd = one.model_copy(update={"optimizer": "sgd", "muon_mode": "default"})
    without = estimate(model, machine, engine, sgd).time.optimizer
    more = {mode: seconds - without for mode, seconds in times.items()}
    assert more["default"] == more["duplicated"]
    assert more["duplicated"] > more["distributed"] > more["layer_sharded"] > more["blockwise"] > 0
    # Measured: 0.56 and 0.25.
    assert 0.3 < more["distributed"] / more["duplicated"] < 0.8
    assert 0.1 < more["layer_sharded"] / more["duplicated"] < 0.4


def test_layer_wise_zero_shares_out_whole_matrices(gpt, a100, cluster, engine, layout):
    plain = engine("megatron", gemm_efficiency=1.0, network_efficiency=1.0, devices={})

    def more(size, **degrees):
        muon, sgd = (
            estimate(gpt, cluster(size), plain, layout(gpt, optimizer=kind, **degrees)).time.optimizer
            for kind in ("muon", "sgd")
        )
        return muon - sgd

    # Nothing is gathered: a part of the work, and at least one matrix of it.
    assert more(8, dp=8, zero=1) == pytest.approx(more(1) / 8)
    assert more(8, dp=8, zero=0) == pytest.approx(more(1))
    largest = 5 * (4 * 4 * gpt.hidden**3 + 2 * gpt.hidden**3) / a100.peak_flops["bf16"]
    assert more(4096, dp=4096, zero=1, gbs=4096) == pytest.approx(largest)
    states = {
        name: held(gpt, cluster(4096), engine(name), layout(gpt, dp=4096, zero=1, gbs=4096, optimizer="muon"))
        for name in ("megatron", "bundled")
    }
    # One rank has the whole state of a matrix: its master copy and its momentum.
    assert states["megatron"] >= 8 * 4 * gpt.hidden**2 > states["bundled"]


def test_a_mode_of_muon_needs_muon_and_an_engine_that_has_it():
    with pytest.raises(ValueError, match="muon_mode distributed needs optimizer muon, not adam"):
        Layout(layers_per_stage=(4,), global_batch_size=8, muon_mode="distributed")
    job: Any = {"world_size": 8, "device": "h100", "global_batch_size": 64}
    with pytest.raises(InputError, match="pin muon_mode=distributed: needs optimizer muon"):
        planner.suggest("llama3-8b", pin=["muon_mode=distributed"], engine="megatron", **job)
    with pytest.raises(InputError, match="engine bundled has duplicated"):
        planner.suggest("llama3-8b", pin=["optimizer=muon", "muon_mode=distributed"], **job)
    plan = planner.suggest(
        "llama3-8b", pin=["optimizer=muon", "muon_mode=distributed", "tp=4"], engine="megatron", **job
    )
    assert "optimizer=muon muon_mode=distributed" in plan.layout.describe()
    assert planner.Plan.model_validate_json(plan.model_dump_json()).layout == plan.layout
    told = planner.evaluate(plan.layout.describe(), model="llama3-8b", engine="megatron", **job)
    assert told == plan.estimate
