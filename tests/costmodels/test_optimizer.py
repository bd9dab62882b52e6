"""What optimizers keep and how long they take."""

from __future__ import annotations

import pytest

from costmodels.catalogue import load_device
from costmodels.layers.optimizer import newton_schulz_flops, newton_schulz_rate
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import unit_sizes
from costmodels.pricing import estimate
from costmodels.ranks.rank_layers import all_ranks, ranks_entry
from costmodels.spec.table import LayoutTable

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
