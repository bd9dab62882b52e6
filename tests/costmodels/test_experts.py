"""Experts: what devices hold of them, keep for them and wait for, and published steps."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels import ModelSpec, even_split
from costmodels.catalogue import load_device, load_engine
from costmodels.layers.shapes import peak_load, peak_routed_rows, routed_rows
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import unit_sizes
from costmodels.pricing import estimate, peak_memory, price
from costmodels.ranks.rank_layers import all_ranks, ranks_entry
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model_parts import ExpertLoad, Router
from costmodels.spec.table import LayoutTable

MEASURED = Path(__file__).parents[3] / "shared" / "measured" / "moe_parallel_folding.csv"


def changed(model, **fields):
    return ModelSpec.model_validate({**model.model_dump(), **fields})


def memory_of(model, cluster, engine, layout):
    table = LayoutTable.of([layout])
    ranks = all_ranks(*ranks_entry(model, table, 0)).each(lambda held: held[None, :])
    return stage_memory(cluster, engine, table, unit_sizes(model, engine, table), ranks)


def test_expert_tensor_parallelism_is_literal(mixture, engine, layout):
    """An expert is whole on a device unless etp splits it, whatever tp is."""
    table = LayoutTable.of(
        [layout(mixture, tp=4, dp=4, ep=ep, etp=etp) for ep, etp in ((1, 1), (1, 4), (4, 1), (4, 4))]
    )
    sizes = unit_sizes(mixture, engine("bundled"), table)
    every = 16 * mixture.mlp_parameters(1024)
    assert sizes.experts.tolist() == [every, every / 4, every / 4, every / 16]
    assert table.expert_replicas.tolist() == [16, 4, 4, 1]


def test_zero_splits_experts_over_the_ranks_that_hold_the_same(mixture, cluster, engine, layout):
    def states(**degrees):
        one = layout(mixture, tp=2, dp=8, m=2, zero=1, **degrees)
        return memory_of(mixture, cluster(16), engine("bundled"), one)["optimizer"][0, 0]

    shared = unit_sizes(mixture, engine("bundled"), LayoutTable.of([layout(mixture, tp=2, dp=8)]))
    experts = mixture.moe_layers * 16 * mixture.mlp_parameters(1024)
    others = 2 * shared.dense_layer[0] + mixture.moe_layers * shared.moe_layer[0]
    others += shared.embedding[0] + shared.head[0]
    for ep, etp in ((1, 1), (4, 1), (8, 2), (16, 1)):
        # A device's share of the experts is the same, however many devices hold an expert.
        assert states(ep=ep, etp=etp) == pytest.approx(12 * (others / 8 + experts / 16))
    copies = states(ep=8, zero_replicas=2) - states(ep=8)
    assert copies == pytest.approx(12 * (others / 8 + experts / 16))


@pytest.mark.parametrize(
    ("name", "precision", "permanent"), [("bundled", "bf16", 0), ("bundled", "fp32", 4), ("nemo", "bf16", 2)]
)
def test_experts_of_one_rank_only_are_copied_by_fsdp2_alone(
    name, precision, permanent, mixture, cluster, engine, layout
):
    """ZeRO 3: FSDP2 copies them from fp32 shards for each use, other engines compute with what is there."""
    wide = changed(mixture, expert_ffn=8192)
    one = layout(wide, dp=16, ep=16, zero=3, precision=precision)
    held = memory_of(wide, cluster(16), engine(name), one)["parameters"][0, 0]
    experts, moe = wide.mlp_parameters(8192), wide.shared_moe_layer_parameters
    ends = 2 * wide.vocab * wide.hidden + wide.norm_parameters
    shared = 2 * wide.dense_layer_parameters + 14 * moe + ends
    layer = max(wide.dense_layer_parameters, moe + experts * (name == "bundled"))
    element = 4 if precision == "fp32" else 2
    expected = permanent * (shared / 16 + 14 * experts) + element * (2 * layer + ends)
    assert held == pytest.approx(expected)


def test_parameters_in_fp32_are_copied_where_some_are_split(mixture, cluster, engine, layout):
    """Also experts of one rank beside what ZeRO splits; nothing where ranks hold all of it."""

    def held(size, **degrees):
        one = layout(mixture, precision="fp32", **degrees)
        return memory_of(mixture, cluster(size), engine("bundled"), one)["parameters"][0, 0]

    experts = mixture.moe_layers * 16 * mixture.mlp_parameters(1024)
    others = mixture.parameters - experts
    assert held(8, dp=8, ep=8, zero=1) == pytest.approx(4 * others * (1 + 1 / 8) + 8 * experts / 8)
    sizes = unit_sizes(mixture, engine("bundled"), LayoutTable.of([layout(mixture, tp=2)]))
    shared = 2 * sizes.dense_layer[0] + mixture.moe_layers * sizes.moe_layer[0]
    shared += sizes.embedding[0] + sizes.head[0]
    assert held(2, tp=2) == pytest.approx(4 * (shared + experts))
    assert held(2, tp=2, ep=2) == pytest.approx(4 * (shared + experts / 2))
    alone = ModelSpec.model_validate({**mixture.model_dump(), "experts": 0, "top_k": 0})
    split = unit_sizes(alone, engine("bundled"), LayoutTable.of([layout(alone, tp=2)]))
    dense = alone.layers * split.dense_layer[0] + split.embedding[0] + split.head[0]
    one = layout(alone, tp=2, precision="fp32")
    found = memory_of(alone, cluster(2), engine("bundled"), one)["parameters"][0, 0]
    assert found == pytest.approx(4 * dense)


def test_experts_that_ranks_replicate_have_a_group_of_their_own(mixture, cluster, engine, layout):
    quiet = engine("bundled", allocator_fragmentation=0.0, allocator_communicator_bytes=1e8)

    def groups(**degrees):
        found = memory_of(mixture, cluster(16), quiet, layout(mixture, dp=16, **degrees))
        return found["communicators"][0, 0] / 1e8

    # Data parallel, expert parallel, and the copies of experts.
    assert (groups(), groups(ep=4), groups(ep=16)) == pytest.approx((2, 3, 2))


def test_dropless_experts_on_several_ranks_are_given_head_room(mixture, cluster, engine, layout):
    """A quarter more rows to keep and to wait for, and no more time; none where a rank has all experts."""
    alone = changed(mixture, shared_expert_ffn=0, expert_ffn=16384)
    one, spread = layout(alone, dp=8), layout(alone, dp=8, ep=8)

    def sizes(factor, which):
        model = changed(alone, router={"capacity_factor": factor})
        return unit_sizes(model, engine("bundled"), LayoutTable.of([which]))

    even, kept, given = 2 * alone.seq, 3 * 2 * 16384 + 2 * alone.hidden, 2 * alone.hidden
    waiting = 2 * (2 * 16384 + alone.hidden)
    for factor, load in ((0.0, 1.25), (0.5, 0.5), (1.0, 1.0), (1.1, 1.1), (2.0, 1.25)):
        for which, rows in ((spread, load), (one, min(load, 1.0))):
            found, usual = sizes(factor, which), sizes(1.0, which)
            more = (rows - 1) * even
            # A rank gets back what its own tokens asked for, however uneven.
            back = (min(rows, 1.0) - 1) * even
            assert found.moe_activations - usual.moe_activations == pytest.approx(more * kept + back * given)
            assert found.output_gradients - usual.output_gradients == pytest.approx(more * waiting)
    balanced = engine("bundled", experts_load=1.0)
    time = estimate(alone, cluster(8), balanced, spread).time
    limited = changed(alone, router={"capacity_factor": 1.0})
    assert time == estimate(limited, cluster(8), balanced, spread).time


def test_the_gate_of_shared_experts_keeps_what_they_give(mixture, engine, layout):
    gated = changed(mixture, shared_expert_gate=True)
    for degrees in ({}, {"tp": 4}, {"tp": 4, "sp": True}):
        table = LayoutTable.of([layout(mixture, dp=4, **degrees)])
        kept = [unit_sizes(one, engine("bundled"), table).moe_activations[0] for one in (gated, mixture)]
        assert kept[0] - kept[1] == 2 * mixture.seq / degrees.get("tp", 1) * mixture.hidden


def test_rows_of_experts_are_what_a_layer_keeps(mixture, engine, layout):
    """Input, gated parts and result of each row, and the router's scores and input, of S / tp tokens."""
    bundled, alone = engine("bundled"), changed(mixture, shared_expert_ffn=0)

    def kept(**degrees):
        table = LayoutTable.of([layout(alone, tp=2, sp=True, dp=8, **degrees)])
        sizes = unit_sizes(alone, bundled, table)
        return sizes.moe_activations[0], sizes.dense_activations[0]

    h, tokens = alone.hidden, alone.seq / 2
    moe, dense = kept(ep=1)
    rows = 2 * tokens
    expected = rows * (3 * 2 * 1024 + 2 * 2 * h) + 4 * tokens * 16 + 2 * tokens * h
    mlp = 3 * 2 * alone.seq * alone.ffn / 2 + 2 * alone.seq * h
    assert moe - dense == pytest.approx(expected - mlp)
    # Twice the rows with half of the width, all of them gathered.
    wide, _ = kept(ep=1, etp=2)
    assert wide - moe == pytest.approx(rows * 2 * 2 * h)
    # Over several ranks the fullest takes in a quarter more, and gets back as many as its tokens asked for.
    spread, _ = kept(ep=4)
    assert spread - moe == pytest.approx(0.25 * rows * (3 * 2 * 1024 + 2 * h))
    # Recomputed as a whole, a mixture of experts keeps the router's input alone.
    less, _ = kept(ep=4, recompute="selective", recompute_modules=("mlp",))
    scores = 4 * tokens * 16
    assert spread - less == pytest.approx(1.25 * rows * (3 * 2 * 1024 + 2 * h) + rows * 2 * h + scores)


def test_shared_experts_keep_an_input_of_their_own_where_it_is_gathered(mixture, engine, layout):
    alone = changed(mixture, shared_expert_ffn=0)
    token = 2 * mixture.seq

    def more(name, tp, sp):
        table = LayoutTable.of([layout(mixture, tp=tp, sp=sp, dp=8)])
        kept = [unit_sizes(one, engine(name), table).moe_activations[0] for one in (mixture, alone)]
        return kept[0] - kept[1] - token * 3 * 1024 / tp

    assert more("bundled", 1, False) == 0
    assert more("bundled", 4, True) == more("bundled", 4, False) == token * mixture.hidden
    assert more("megatron", 4, True) == 0


def test_shared_experts_hide_the_way_to_the_others(mixture, cluster, engine, layout):
    """On GPUs the way there hides behind the shared experts' products, the way back behind nothing."""
    bundled = engine("bundled", host_layer_overhead=0.0)

    def seconds(model, **degrees):
        return estimate(model, cluster(16), bundled, layout(model, dp=16, **degrees)).time.expert_parallel

    alone, helped = changed(mixture, shared_expert_ffn=0), changed(mixture, shared_expert_ffn=65536)
    assert seconds(helped, ep=8) == pytest.approx(3 / 4 * seconds(alone, ep=8))
    assert seconds(alone, ep=1) == 0
    assert seconds(alone, ep=8) < seconds(alone, ep=16)


def test_recomputing_layers_or_their_experts_sends_tokens_again(mixture, cluster, engine, layout):
    def seconds(**fields):
        one = layout(changed(mixture, shared_expert_ffn=0), dp=16, ep=8, **fields)
        return estimate(changed(mixture, shared_expert_ffn=0), cluster(16), engine("bundled"), one).time

    usual = seconds().expert_parallel
    for recompute in ({"recompute": "full"}, {"recompute": "selective", "recompute_modules": ("mlp",)}):
        again = seconds(**recompute)
        assert again.expert_parallel == pytest.approx(1.5 * usual)
        assert again.recompute > 0
    activation = seconds(recompute="selective", recompute_modules=("activation",))
    assert activation.expert_parallel == pytest.approx(usual)


def test_the_bundled_runtime_keeps_experts_in_16_bits(mixture, engine, layout):
    h100 = load_device("h100-sxm")
    machine = Cluster(device=h100, world_size=8, devices_per_node=8, memory_bytes=h100.memory_bytes)
    large = changed(mixture, expert_ffn=16384)

    def compute(precision, **constants):
        one = engine("bundled", gemm_fp8_half_width=0.0, **constants)
        return estimate(large, machine, one, layout(large, dp=8, mbs=8, precision=precision)).time.compute

    wide = compute("bf16")
    assert compute("fp8", experts_fp8=True) < 0.65 * wide < compute("fp8") < wide


def test_peak_memory_is_that_of_the_prices(mixture, cluster, engine, layout):
    table = LayoutTable.of(
        [
            layout(mixture, tp=tp, sp=tp > 1, pp=2, dp=16 // tp, ep=ep, m=8, zero=zero)
            for tp in (1, 2)
            for ep in (1, 4, 16)
            for zero in (0, 1, 3)
        ]
    )
    for name in ("bundled", "megatron"):
        whole = price(mixture, cluster(32), engine(name), table).peak_memory_bytes
        np.testing.assert_allclose(peak_memory(mixture, cluster(32), engine(name), table), whole, rtol=1e-12)


def folded(row, engine, device):
    """Seconds of a step with the faster of the choices that fit and that arXiv:2504.14960 leaves open."""
    number = {name: int(row[name]) for name in ("tp", "pp", "dp", "cp", "ep", "gbs")}
    shape: dict[str, Any] = {
        name: int(row[name]) for name in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq")
    }
    model = ModelSpec(
        name=row["model_name"],
        **shape,
        ffn=int(row["ffn"]),
        expert_ffn=int(row["ffn"]),
        experts=int(row["moe_experts"]),
        top_k=int(row["topk"]),
        gated=True,
        norm="rmsnorm",
        position="rope",
        tied=False,
        linear_bias=False,
        router=Router(capacity_factor=1.0),
    )
    chunks = [
        n for n in (1, 2, 4, 7) if model.layers % (number["pp"] * n) == 0 and (n == 1 or number["pp"] > 1)
    ]
    layouts = [
        Layout(
            tensor_parallel=number["tp"],
            sequence_parallel=number["tp"] > 1,
            pipeline_parallel=number["pp"],
            virtual_pipeline_parallel=n,
            schedule="interleaved" if n > 1 else "1f1b",
            context_parallel=number["cp"],
            data_parallel=number["dp"],
            expert_parallel=number["ep"],
            expert_tensor_parallel=1 if "w/ Folding" in row["notes"] else number["tp"],
            zero_stage=1,
            layers_per_stage=even_split(model.layers, number["pp"] * n),
            global_batch_size=number["gbs"],
            recompute=recompute,
        )
        for n in chunks
        for recompute in ("none", "full")
    ]
    size = int(row["gpus"])
    cluster = Cluster(device=device, world_size=size, devices_per_node=8, memory_bytes=device.memory_bytes)
    prices = price(model, cluster, engine, LayoutTable.of(layouts))
    fits = prices.peak_memory_bytes <= cluster.memory_bytes
    return float(prices.step_time_s[fits].min())


def test_published_mixtures_of_experts_are_met_without_fitting():
    """Mixtral 8x22B on 128 to 1024 H100s, with experts split as the MLP and folded over all ranks."""
    if not MEASURED.exists():
        pytest.skip(f"{MEASURED} is not here")
    with MEASURED.open(encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model_name"] == "Mixtral-8x22B"
            and "method=MCore" in row["notes"]
            and row["precision"] == "bf16"
        ]
    assert len(rows) > 15
    engine, device = load_engine("megatron"), load_device("h100-sxm")
    # Seconds: the published TFLOP/s count all scores, as Megatron-Core did before 0.12, ours the causal half.
    ratios = [float(row["step_time_derived_s"]) / folded(row, engine, device) for row in rows]
    assert np.median(np.abs(np.log(ratios))) < 0.08
    assert max(ratios) < 1.2 and min(ratios) > 0.85
    short = [
        (row["notes"].count("w/ Folding"), ratio * float(row["tflops_per_gpu"]))
        for row, ratio in zip(rows, ratios, strict=True)
        if row["seq"] == "4096"
    ]
    # Folding is the faster of the two, as it was found to be.
    assert np.mean([speed for fold, speed in short if fold]) > np.mean(
        [speed for fold, speed in short if not fold]
    )


def test_all_wait_for_the_fullest_rank_of_experts(mixture, cluster, engine, layout):
    def times(load, **degrees):
        one = engine("megatron", experts_load=load)
        return estimate(mixture, cluster(8), one, layout(mixture, dp=8, **degrees)).time

    even, uneven = times(1.0, ep=4), times(1.5, ep=4)
    assert uneven.compute > 1.1 * even.compute
    assert uneven.expert_parallel > 1.2 * even.expert_parallel
    # A device that has all experts has all their tokens.
    assert times(1.5) == times(1.0)


def test_loads_of_a_model_are_waited_for_and_held(mixture, cluster, engine, layout):
    loads = (ExpertLoad(ranks=1, mean=1.1, peak=1.2), ExpertLoad(ranks=4, mean=1.5, peak=2.0))
    router = mixture.router.model_copy(update={"loads": loads})
    uneven = mixture.model_copy(update={"router": router})

    def rows(model, which, ep):
        return which(model, LayoutTable.of([layout(model, dp=8, ep=ep)]))[0]

    for ep, mean, peak in ((2, 1.1, 1.25), (4, 1.5, 2.0), (8, 1.5, 2.0)):
        even = routed_rows(mixture, LayoutTable.of([layout(mixture, dp=8, ep=ep)]), 1.0)
        assert rows(uneven, routed_rows, ep) == pytest.approx(mean * even[0])
        held = peak / 1.25 * rows(mixture, peak_routed_rows, ep)
        assert rows(uneven, peak_routed_rows, ep) == pytest.approx(held)
        assert peak_load(uneven, ep) == peak
    # A device that has all experts has all their tokens.
    assert rows(uneven, routed_rows, 1) == rows(mixture, routed_rows, 1)
    constant = engine("megatron", experts_load=1.5)
    one = layout(mixture, dp=8, ep=4)
    assert estimate(uneven, cluster(8), engine("megatron", experts_load=1.0), one).time == pytest.approx(
        estimate(mixture, cluster(8), constant, one).time
    )


def test_fused_experts_compute_as_much_and_move_less(mixture, engine, layout):
    h100 = load_device("h100-sxm")
    machine = Cluster(device=h100, world_size=8, devices_per_node=8, memory_bytes=h100.memory_bytes)

    def times(fused):
        one = engine("nemo", experts_fused=fused, experts_grouped=True)
        return estimate(mixture, machine, one, layout(mixture, dp=8, ep=4, precision="fp8")).time

    apart, fused = times(False), times(True)
    assert fused.compute == apart.compute
    assert fused.expert_parallel == apart.expert_parallel
    assert fused.elementwise < 0.8 * apart.elementwise


def test_a_step_in_one_graph_waits_for_no_launch(mixture, cluster, engine, layout):
    def launch(graph):
        one = engine("megatron", host_graph=graph, host_layer_overhead=1e-2, host_kernel_gaps=0.0)
        return estimate(mixture, cluster(8), one, layout(mixture, dp=8)).time.launch

    assert launch(True) == 0 < launch(False)


def test_halves_hide_an_exchange_each_way_behind_products_of_the_other(mixture, cluster, engine, layout):
    alone = changed(mixture, shared_expert_ffn=0)

    def times(halves, **constants):
        one = engine("bundled", network_dispatch_latency=0.0, **constants)
        rows = layout(alone, dp=16, ep=8).model_copy(update={"expert_halves": halves})
        return estimate(alone, cluster(16), one, rows).time

    # Links so fast that there is always enough to hide behind, and so slow that there never is.
    fast, slow = {"network_efficiency": 1.0}, {"network_efficiency": 1e-3}
    slow["network_inter_node_efficiency"] = 1e-3
    whole, halved = (times(halves, **fast) for halves in (False, True))
    # Each half has a latency of its own.
    assert 0.5 * whole.expert_parallel < halved.expert_parallel < 0.6 * whole.expert_parallel
    assert halved.compute == whole.compute
    whole, halved = (times(halves, **slow).expert_parallel for halves in (False, True))
    assert 0.9 * whole < halved < whole


def test_exchanges_of_experts_hide_behind_another_micro_batch_as_far_as_it_computes(
    mixture, cluster, engine, layout
):
    alone = changed(mixture, shared_expert_ffn=0)

    def exchange(share, **constants):
        one = engine("megatron", overlap_expert_parallel=share, **constants)
        return estimate(alone, cluster(16), one, layout(alone, dp=16, ep=8)).time.expert_parallel

    assert exchange(0.75, network_efficiency=1.0) == pytest.approx(
        0.25 * exchange(0.0, network_efficiency=1.0)
    )
    # Links a thousand times slower: far more than there is to hide behind.
    slow = {"network_efficiency": 1e-3, "network_inter_node_efficiency": 1e-3}
    assert exchange(0.75, **slow) > 0.9 * exchange(0.0, **slow)
