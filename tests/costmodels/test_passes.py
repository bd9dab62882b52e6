"""Seconds of operators: rooflines, attention kernels, recomputation and the launch floor."""

from typing import Any

import numpy as np
import pytest

from costmodels.catalogue import load_device, load_engine
from costmodels.errors import InputError
from costmodels.layers.operators import Gemm, head, layer, padded_vocabulary
from costmodels.network.collectives import all_gather, group
from costmodels.spec.hardware import Collective, MeasuredCollective
from costmodels.spec.table import LayoutTable
from costmodels.time.core_attention import attention_seconds
from costmodels.time.gemms import GemmRates, gemm_seconds, peak_flops
from costmodels.time.host_launch import launch_floor
from costmodels.time.passes import PARTS, passes

FLASH_BACKWARD = (5 / 2) * (0.73 / 0.63)
"""Seconds of FlashAttention-2's backward over those of its forward, by its paper (arXiv:2307.08691).

Backward has five GEMMs where forward has two (section 3.1.2). On an A100 forward reaches up to 73 % of the
peak FLOP/s, and backward up to 63 % (section 1): each FLOP of backward takes 73 / 63 as long.
"""


def layer_passes(model, device, engine, table, cluster):
    degree = table.tensor_parallel
    alone = np.ones_like(degree)
    groups = {name: group(cluster, engine, alone, alone) for name in ("cp", "ep", "etp")}
    groups["tp"] = group(cluster, engine, degree, alone)
    return passes(layer(model, engine, table, "dense"), device, engine, table, groups, repeats=True)


def test_matrix_products_run_at_the_roofline():
    def gemm(m, k, n):
        rows, inner, columns = (np.array([float(size)]) for size in (m, k, n))
        return Gemm(rows, inner, columns, times=np.ones(1))

    large, thin = gemm(8192, 8192, 8192), gemm(1, 8192, 8192)
    rates = GemmRates(flops=250e12, wide_flops=125e12, bandwidth=2e12, element=2)
    assert gemm_seconds((large,), rates)[0] == pytest.approx(2 * 8192**3 / 250e12, rel=1e-2)
    assert gemm_seconds((thin,), rates)[0] == pytest.approx(2 * 8192**2 / 2e12, rel=1e-2)
    balanced = rates._replace(bandwidth=3 * 8192**2 * 2 / (2 * 8192**3 / 250e12))
    assert gemm_seconds((large,), balanced)[0] == pytest.approx(2**0.5 * 2 * 8192**3 / 250e12)
    twice = gemm_seconds((large._replace(wide=True),), rates)[0]
    assert twice == pytest.approx(2 * gemm_seconds((large,), rates)[0], rel=1e-2)


def test_small_products_pay_for_their_launch_their_last_wave_and_a_narrow_inside():
    side = np.array([256.0])
    small = Gemm(side, side, side, times=np.ones(1))
    plain = GemmRates(flops=250e12, wide_flops=250e12, bandwidth=1e15, element=2)
    free = gemm_seconds((small,), plain)[0]
    assert gemm_seconds((small,), plain._replace(launch=5e-6))[0] == pytest.approx(free + 5e-6)
    assert gemm_seconds((small,), plain._replace(wave=256.0**2))[0] == pytest.approx(2 * free, rel=1e-2)
    assert gemm_seconds((small,), plain._replace(half_width=256.0))[0] == pytest.approx(2 * free, rel=1e-2)
    experts = small._replace(times=np.full(1, 64.0))
    launched = plain._replace(launch=5e-6)
    assert gemm_seconds((experts,), launched)[0] == pytest.approx(64 * (free + 5e-6))
    assert gemm_seconds((experts,), launched._replace(grouped=True))[0] == pytest.approx(64 * free + 5e-6)


def test_flash_attention_skips_what_causality_masks(gpt, a100, engine, layout):
    table = LayoutTable.of([layout(gpt)])
    flash = engine("megatron", attention_efficiency=0.5)
    work = layer(gpt, flash, table, mlp="dense")
    forward, backward = attention_seconds(work, a100, flash, table, 312e12, 2e12, 2)
    assert forward[0] == pytest.approx(2 * gpt.seq**2 * gpt.hidden / (312e12 * 0.5))
    assert backward[0] == pytest.approx(forward[0] * FLASH_BACKWARD)
    plain = flash.with_constants({"attention.flash": False})
    unfused, _ = attention_seconds(work, a100, plain, table, 312e12, 2e12, 2)
    assert unfused[0] > 3 * forward[0]


def test_flash_attention_is_slower_on_short_sequences_narrow_heads_and_few_of_them(gpt, a100, engine, layout):
    def forward(**constants):
        flash = engine("megatron", attention_efficiency=0.5, **constants)
        table = LayoutTable.of([layout(gpt, tp=8), layout(gpt)])
        work = layer(gpt, flash, table, mlp="dense")
        return attention_seconds(work, a100, flash, table, 312e12, 2e12, 2)[0]

    few, all_heads = forward()
    assert forward(attention_half_seq=gpt.seq)[1] == pytest.approx(2 * all_heads)
    assert forward(attention_half_head=gpt.head_dim)[1] == pytest.approx(2 * all_heads)
    in_waves = forward(attention_wave=1.0)
    # A wave is one block of 128 queries on each multiprocessor; a rank has seq x heads / tp queries.
    assert in_waves[0] / few - 1 == pytest.approx(108 * 128 / (gpt.seq * gpt.heads / 8))
    assert in_waves[0] / few > in_waves[1] / all_heads


@pytest.mark.parametrize(("size", "published"), [(128, 195e12), (64, 176e12)])
@pytest.mark.parametrize("name", ["megatron", "deepspeed", "torchtitan"])
def test_flash_attention_2_is_as_fast_as_published_on_an_a100(name, size, published, gpt, layout):
    """Forward and backward, causal, 16384 tokens (Dao-AILab's benchmark): 3.5 x 2 x s^2 x hidden FLOP."""
    a100 = load_device("a100-80g")
    model = gpt.model_copy(update={"seq": 16384, "heads": gpt.hidden // size, "head_dim": size})
    table = LayoutTable.of([layout(model)])
    software = load_engine(name).for_device(a100)
    work = layer(model, software, table, mlp="dense")
    forward, backward = attention_seconds(work, a100, software, table, 312e12, 2e12, 2)
    needed = 3.5 * 2 * model.seq**2 * model.hidden
    assert needed / (forward + backward)[0] == pytest.approx(published, rel=0.1)


def test_each_kernel_between_the_products_of_attention_passes_over_the_scores(gpt, a100, engine, layout):
    plain = engine("megatron", attention_flash=False)
    table = LayoutTable.of([layout(gpt)])
    work = layer(gpt, plain, table, mlp="dense")

    def seconds(**constants):
        changed = plain.with_constants({f"attention.{name}": value for name, value in constants.items()})
        return np.array(attention_seconds(work, a100, changed, table, 312e12, 2e12, 2))[:, 0]

    one_pass = 2 * gpt.heads * gpt.seq**2 / 2e12
    more = seconds(score_passes=12, score_passes_backward=14) - seconds()
    assert more == pytest.approx([8 * one_pass, 7 * one_pass])


def test_products_of_heads_that_are_not_aligned_do_without_tensor_cores(gpt, a100, engine, layout):
    """BLOOM's prequel: heads of 108 elements took a fifth more of a step than heads of 104 or 112."""
    plain = engine("megatron", attention_flash=False)
    table = LayoutTable.of([layout(gpt)])

    def products(size, device=a100, element=2):
        model = gpt.model_copy(update={"head_dim": size})
        work = layer(model, plain, table, mlp="dense")
        return attention_seconds(work, device, plain, table, 312e12, 1e30, element)[0][0]

    assert products(104) / 104 == pytest.approx(products(112) / 112)
    assert products(108) / 108 == pytest.approx(products(112) / 112 * 312 / 78)
    assert products(108, element=4) / 108 == pytest.approx(products(112) / 112)
    other = a100.model_copy(update={"kind": "npu"})
    assert products(108, other) / 108 == pytest.approx(products(112) / 112)


@pytest.mark.parametrize(
    ("size", "kernel"), [(64, 64), (72, 96), (80, 96), (128, 128), (136, 192), (200, 256)]
)
def test_flash_attention_computes_with_padded_heads(size, kernel, gpt, a100, engine, layout):
    def seconds(head, device):
        model = gpt.model_copy(update={"head_dim": head})
        table = LayoutTable.of([layout(model)])
        flash = engine("megatron", attention_efficiency=0.5, attention_half_head=32)
        work = layer(model, flash, table, mlp="dense")
        return attention_seconds(work, device, flash, table, 312e12, 2e12, 2)[0][0]

    assert seconds(size, a100) == pytest.approx(seconds(kernel, a100))
    processor = a100.model_copy(update={"kind": "cpu"})
    assert (seconds(size, processor) < seconds(kernel, processor)) == (size < kernel)


def test_a_ring_sees_the_tokens_of_one_rank_at_a_time(gpt, a100, engine, layout):
    flash = engine("megatron", attention_efficiency=0.5, attention_half_seq=512)
    rings = [layout(gpt, cp=4, dp=2, context_parallel_form=form) for form in ("all_gather", "ring")]
    table = LayoutTable.of(rings)
    work = layer(gpt, flash, table, mlp="dense")
    gathered, ring = attention_seconds(work, a100, flash, table, 312e12, 2e12, 2)[0]
    assert ring / gathered == pytest.approx((1 + 4 * 512 / gpt.seq) / (1 + 512 / gpt.seq))


def test_longer_layers_that_wait_for_the_host_are_never_faster(gpt, a100, engine, layout, cluster):
    # Recomputation ends early: its wait for the host is its own, not that of the forward pass.
    table = LayoutTable.of([layout(gpt, recompute="full", mbs=mbs) for mbs in (1, 2, 4)])
    slow = engine("bundled", host_layer_overhead=0.5, host_backward=1.0, host_chained=1.0)
    found = layer_passes(gpt, a100, slow, table, cluster(8)).total
    assert np.all(np.diff(found) >= -1e-12)
    assert found[0] == pytest.approx(1.5, rel=0.02)


def test_full_recomputation_repeats_exactly_the_forward_pass(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, tp=2, recompute=kind) for kind in ("none", "selective", "full")])
    times = layer_passes(gpt, a100, engine("megatron", host_layer_overhead=0.0), table, cluster(8))
    forward = times.total[0] - times.backward[0]
    assert times.total[2] - times.total[0] == pytest.approx(forward)
    assert times.recompute[0] == 0
    assert times.recompute[1] == pytest.approx(times.attention[1] / (1 + FLASH_BACKWARD))
    assert times.total - times.backward == pytest.approx(forward)


def test_saving_every_second_product_repeats_the_others_and_no_attention(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, recompute=kind) for kind in ("none", "selective", "full")])
    saving = engine("megatron", host_layer_overhead=0.0, saves_alternate_products=True)
    none, second, full = layer_passes(gpt, a100, saving, table, cluster(8)).recompute
    assert none == 0 < second < full
    # GEMMs of keys and of attention's output in a plain block: 2 h^2 of 12 h^2, both small.
    bare = engine("megatron", host_layer_overhead=0.0, saves_alternate_products=True, elementwise_passes=1e-6)
    times = layer_passes(gpt, a100, bare, table, cluster(8))
    assert times.recompute[1] == pytest.approx(times.compute[0] / 3 / 6, rel=0.25)


def test_the_host_bounds_small_layers(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt)])
    quick = layer_passes(gpt, a100, engine("megatron", host_layer_overhead=0.0), table, cluster(8))
    bound = layer_passes(gpt, a100, engine("megatron", host_layer_overhead=1.0), table, cluster(8))
    assert quick.launch[0] == pytest.approx(0)
    assert bound.total[0] == pytest.approx(2.0, rel=1e-3)
    uneven = engine("megatron", host_layer_overhead=1.0, host_backward=1.5)
    assert layer_passes(gpt, a100, uneven, table, cluster(8)).total[0] == pytest.approx(2.5, rel=1e-3)
    assert sum(getattr(bound, part)[0] for part in PARTS) == bound.total[0]


def test_on_a_cpu_launching_adds_to_computing(gpt, a100, engine, layout, cluster):
    degrees: tuple[dict[str, Any], ...] = ({}, {"tp": 2}, {"tp": 2, "sp": True})
    table = LayoutTable.of([layout(gpt, **degree) for degree in degrees])
    slow = engine(
        "megatron", host_layer_overhead=0.5, host_tensor_parallel=3.0, host_sequence_parallel=5.0, devices={}
    )
    cpu = a100.model_copy(update={"kind": "cpu"})
    assert layer_passes(gpt, cpu, slow, table, cluster(8)).launch == pytest.approx([1.0, 3.0, 5.0])
    assert layer_passes(gpt, a100, slow, table, cluster(8)).launch[1] < 3.0


def test_the_host_waits_longer_with_every_doubling_and_across_nodes(gpt, a100, engine, layout, cluster):
    def launch(count=8, **degrees):
        slow = engine("megatron", host_layer_overhead=1.0, host_tensor_parallel=1.5, devices={})
        table = LayoutTable.of([layout(gpt, **degrees)])
        return layer_passes(gpt, a100, slow, table, cluster(count)).total[0] / 2

    assert [launch(tp=degree) for degree in (1, 2, 4)] == pytest.approx([1.0, 1.5, 2.25], rel=1e-2)
    assert launch(16, tp=16) == pytest.approx(1.5**3 * 2, rel=1e-2)


def test_hidden_collectives_cost_less(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, tp=8, sp=True)])
    seen, hidden = (
        layer_passes(gpt, a100, engine("megatron", overlap_tensor_parallel=share), table, cluster(8))
        for share in (0.0, 0.75)
    )
    assert hidden.tensor_parallel[0] == pytest.approx(seen.tensor_parallel[0] / 4)


def test_launch_floor_is_between_maximum_and_sum():
    seconds = np.array([0.0, 1.0, 1.0, 5.0])
    joined = seconds + launch_floor(seconds, 1.0)
    assert joined[0] == pytest.approx(1.0)
    assert 1.0 < joined[1] < 1.1
    assert joined[3] == pytest.approx(5.0, rel=1e-4)


def test_fp8_speeds_up_layers_but_not_the_head(gpt, a100, engine, layout, cluster):
    peaks = {"bf16": 1e15, "fp8": 2e15}
    device = a100.model_copy(update={"peak_flops": peaks, "memory_bandwidth": 1e14})
    nvidia = engine("nemo", devices={}, gemm_launch=0.0, gemm_fp8_half_width=0.0)
    alone = np.ones(1, dtype=np.int64)
    groups = {name: group(cluster(8), nvidia, alone, alone) for name in ("tp", "cp", "ep", "etp")}
    seconds = {}
    for precision in ("bf16", "fp8"):
        table = LayoutTable.of([layout(gpt, mbs=8, precision=precision)])
        layers = passes(layer(gpt, nvidia, table, "dense"), device, nvidia, table, groups, repeats=True)
        work = head(gpt, nvidia, padded_vocabulary(gpt, table), table)
        top = passes(work, device, nvidia, table, groups, repeats=False, wide=True)
        seconds[precision] = layers.compute[0], top.compute[0], layers.attention[0]
    assert seconds["fp8"][0] == pytest.approx(seconds["bf16"][0] / 2, rel=1e-3)
    assert seconds["fp8"][1:] == seconds["bf16"][1:]


def test_fp8_casts_both_operands_of_every_product(gpt, a100, engine, layout, cluster):
    """x and w forward; gradient and w, gradient and x backward: two sides of each of the three matrices."""

    def cost(weights: float, activations: float) -> dict[str, float]:
        return {"gemm_fp8_cast_bytes": weights, "gemm_fp8_activation_cast_bytes": activations}

    device = a100.model_copy(update={"peak_flops": {"bf16": 1e15, "fp8": 2e15}})
    table = LayoutTable.of([layout(gpt, precision="fp8")])
    free, priced, once = (
        layer_passes(
            gpt,
            device,
            engine("bundled", **costs, gemm_fp8_weights_once=is_once),
            table,
            cluster(8),
        )
        for costs, is_once in ((cost(0.0, 0.0), False), (cost(5.0, 2.0), False), (cost(5.0, 2.0), True))
    )
    t, h = gpt.seq, gpt.hidden
    shapes = [(t, h, 3 * h), (t, h, h), (t, h, 4 * h), (t, 4 * h, h)]
    bytes_ = sum(2 * (2 * (m * k + m * n) + 5 * k * n) for m, k, n in shapes)
    rate = 2.039e12 * 0.85
    assert priced.elementwise[0] - free.elementwise[0] == pytest.approx(bytes_ / rate)
    # Casts once a step are no part of a pass.
    less = 2 * sum(k * n for _, k, n in shapes)
    assert priced.elementwise[0] - once.elementwise[0] == pytest.approx(5 * less / rate)
    by_rows = engine("bundled").gemm.of_recipe("rowwise")
    assert (by_rows.fp8_cast_bytes, by_rows.fp8_activation_cast_bytes) == (5, None)
    bf16 = LayoutTable.of([layout(gpt, precision="bf16")])
    assert layer_passes(gpt, device, engine("bundled"), bf16, cluster(8)).elementwise == free.elementwise


def test_a_format_that_the_device_lacks_is_named_with_those_it_has(a100):
    with pytest.raises(InputError, match=r"precision fp8: device a100-80gb .* use fp32, tf32, fp16, bf16$"):
        peak_flops(a100, "fp8")


def test_a_softmax_that_no_kernel_fuses_takes_more_launches(gpt, a100, engine, layout, cluster):
    slow = {"host_layer_overhead": 0.1, "attention_flash": False, "host_unfused_softmax": 1.5}
    table = LayoutTable.of([layout(gpt, tp=8, mbs=mbs, m=2) for mbs in (1, 2)])
    plain = layer_passes(gpt, a100, engine("megatron", **slow), table, cluster(8)).launch
    four = layer_passes(
        gpt, a100, engine("megatron", attention_softmax_batch=4, **slow), table, cluster(8)
    ).launch
    # 16 heads on 8 devices: two for each sequence.
    assert four[0] == pytest.approx(1.5 * plain[0], rel=1e-2)
    assert four[1] == plain[1]


def test_a_blunt_floor_leaves_more_idle_time():
    seconds = np.array([1.0, 1.0])
    sharp, blunt = (launch_floor(seconds, np.array([1.0, 0.5]), power) for power in (8.0, 2.0))
    assert blunt == pytest.approx([2**0.5 - 1, 1.25**0.5 - 1])
    assert (sharp < blunt).all()


def test_hosts_of_groups_over_nodes_wait_as_the_engine_says(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, tp=16)])
    waits, runs = (
        layer_passes(
            gpt, a100, engine("megatron", host_layer_overhead=0.1, host_nodes=power), table, cluster(16)
        )
        for power in (1, 0)
    )
    assert waits.launch == pytest.approx(2 * runs.launch, rel=0.05)


def test_a_whole_vocabulary_may_run_slower(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, tp=tp) for tp in (1, 2)])
    alone = np.ones(2, dtype=np.int64)
    groups = {name: group(cluster(2), engine("megatron"), alone, alone) for name in ("tp", "cp", "ep", "etp")}

    def head_seconds(**constants):
        chosen = engine("megatron", **constants)
        work = head(gpt, chosen, padded_vocabulary(gpt, table), table)
        return passes(work, a100, chosen, table, groups, repeats=False).compute

    ratio = head_seconds(gemm_whole_head_efficiency=0.5) / head_seconds()
    assert ratio == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize("told", [False, True])
def test_calls_in_a_node_are_priced_each_where_they_were_measured(gpt, engine, layout, cluster, told):
    """A rate alone says nothing of calls: what they take is in the constants that were fitted to gathers."""
    kinds: dict[Collective, float] = {"all_gather": 1e-4, "reduce_scatter": 3e-4, "all_reduce": 5e-4}
    measured = tuple(
        MeasuredCollective(
            collective=kind, devices=8, nodes=1, bus_bandwidth=1e11, latency=latency if told else 0.0
        )
        for kind, latency in kinds.items()
    )
    nodes, megatron = cluster(8).model_copy(update={"measured": measured}), engine("megatron")
    table = LayoutTable.of([layout(gpt, tp=8)])
    seconds = layer_passes(gpt, nodes.device, megatron, table, nodes).tensor_parallel[0]
    work, alone = layer(gpt, megatron, table, "dense"), np.ones(1, dtype=np.int64)
    tp = group(nodes, megatron, table.tensor_parallel, alone)
    gathers = (work.gathers_forward + work.gathers_backward) * (1 - megatron.overlap.tensor_parallel)
    as_gathers = (gathers * all_gather(tp, work.sequence_bytes))[0]
    assert (seconds == pytest.approx(as_gathers, rel=1e-6)) is not told
