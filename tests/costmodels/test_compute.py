"""Seconds of operators: rooflines, attention kernels, recomputation and the launch floor."""

import numpy as np
import pytest

from costmodels.compute import PARTS, attention_seconds, gemm_seconds, launch_floor, passes, peak_flops
from costmodels.errors import InputError
from costmodels.network import group
from costmodels.operators import Gemm, head, layer, padded_vocabulary
from costmodels.table import LayoutTable


def layer_passes(model, device, engine, table, cluster):
    degree = table.tensor_parallel
    alone = np.ones_like(degree)
    groups = {name: group(cluster, 1.0, alone, alone) for name in ("cp", "ep", "etp")}
    groups["tp"] = group(cluster, 1.0, degree, alone)
    return passes(layer(model, engine, table, False), device, engine, table, groups, repeats=True)


def test_matrix_products_run_at_the_roofline():
    def gemm(m, k, n):
        return Gemm(*(np.array([float(size)]) for size in (m, k, n)), times=np.ones(1))

    large, thin = gemm(8192, 8192, 8192), gemm(1, 8192, 8192)
    assert gemm_seconds((large,), 250e12, 2e12, 2)[0] == pytest.approx(2 * 8192**3 / 250e12)
    assert gemm_seconds((thin,), 250e12, 2e12, 2)[0] == pytest.approx(2 * 8192**2 / 2e12, rel=1e-3)


def test_flash_attention_skips_what_causality_masks(gpt, a100, engine, layout):
    table = LayoutTable.of([layout(gpt)])
    flash = engine("megatron", attention_efficiency=0.5)
    work = layer(gpt, flash, table, moe=False)
    forward, backward = attention_seconds(work, flash, 312e12, 2e12, 2)
    assert forward[0] == pytest.approx(2 * gpt.seq**2 * gpt.hidden / (312e12 * 0.5))
    assert backward[0] == pytest.approx(forward[0] * 2.5 * 73 / 63)
    unfused, _ = attention_seconds(work, flash.model_copy(update={"flash_attention": False}), 312e12, 2e12, 2)
    assert unfused[0] > 3 * forward[0]


def test_full_recomputation_repeats_exactly_the_forward_pass(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, tp=2, recompute=kind) for kind in ("none", "selective", "full")])
    times = layer_passes(gpt, a100, engine("megatron", layer_overhead=0.0), table, cluster(8))
    forward = times.total[0] - times.backward[0]
    assert times.total[2] - times.total[0] == pytest.approx(forward)
    assert times.recompute[0] == 0
    assert times.recompute[1] == pytest.approx(times.attention[1] / (1 + 2.5 * 73 / 63))
    assert times.total - times.backward == pytest.approx(forward)


def test_the_host_bounds_small_layers(gpt, a100, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt)])
    quick = layer_passes(gpt, a100, engine("megatron", layer_overhead=0.0), table, cluster(8))
    bound = layer_passes(gpt, a100, engine("megatron", layer_overhead=1.0), table, cluster(8))
    assert quick.launch[0] == pytest.approx(0)
    assert bound.total[0] == pytest.approx(2.0, rel=1e-3)
    assert sum(getattr(bound, part)[0] for part in PARTS) == bound.total[0]


def test_on_a_cpu_launching_adds_to_computing(gpt, a100, engine, layout, cluster):
    degrees = ({}, {"tp": 2}, {"tp": 2, "sp": True})
    table = LayoutTable.of([layout(gpt, **degree) for degree in degrees])
    slow = engine(
        "megatron", layer_overhead=0.5, tensor_parallel_launch=3.0, sequence_parallel_launch=5.0, devices={}
    )
    cpu = a100.model_copy(update={"kind": "cpu"})
    assert layer_passes(gpt, cpu, slow, table, cluster(8)).launch.tolist() == [1.0, 3.0, 5.0]
    assert layer_passes(gpt, a100, slow, table, cluster(8)).launch[1] < 3.0


def test_launch_floor_is_between_maximum_and_sum():
    seconds = np.array([0.0, 1.0, 1.0, 5.0])
    joined = seconds + launch_floor(seconds, 1.0)
    assert joined[0] == pytest.approx(1.0)
    assert 1.0 < joined[1] < 1.1
    assert joined[3] == pytest.approx(5.0, rel=1e-4)


def test_fp8_speeds_up_layers_but_not_the_head(gpt, a100, engine, layout, cluster):
    peaks = {"bf16": 1e15, "fp8": 2e15}
    device = a100.model_copy(update={"peak_flops": peaks, "memory_bandwidth": 1e14})
    nvidia = engine("nemo")
    alone = np.ones(1, dtype=np.int64)
    groups = {name: group(cluster(8), 1.0, alone, alone) for name in ("tp", "cp", "ep", "etp")}
    seconds = {}
    for precision in ("bf16", "fp8"):
        table = LayoutTable.of([layout(gpt, mbs=8, precision=precision)])
        layers = passes(layer(gpt, nvidia, table, False), device, nvidia, table, groups, repeats=True)
        work = head(gpt, padded_vocabulary(gpt, table), table)
        top = passes(work, device, nvidia, table, groups, repeats=False, wide=True)
        seconds[precision] = layers.compute[0], top.compute[0], layers.attention[0]
    assert seconds["fp8"][0] == pytest.approx(seconds["bf16"][0] / 2)
    assert seconds["fp8"][1:] == seconds["bf16"][1:]


def test_fp8_casts_both_operands_of_every_product(gpt, a100, engine, layout, cluster):
    """x and w forward; gradient and w, gradient and x backward: two sides of each of the three matrices."""
    device = a100.model_copy(update={"peak_flops": {"bf16": 1e15, "fp8": 2e15}})
    table = LayoutTable.of([layout(gpt, precision="fp8")])
    free, priced = (
        layer_passes(gpt, device, engine("bundled", fp8_cast_bytes=cost), table, cluster(8))
        for cost in (0.0, 5.0)
    )
    t, h = gpt.seq, gpt.hidden
    shapes = [(t, h, 3 * h), (t, h, h), (t, h, 4 * h), (t, 4 * h, h)]
    elements = sum(2 * (m * k + k * n + m * n) for m, k, n in shapes)
    rate = 2.039e12 * 0.85
    assert priced.elementwise[0] - free.elementwise[0] == pytest.approx(5 * elements / rate)
    assert engine("bundled").fp8_cast_bytes == 5
    bf16 = LayoutTable.of([layout(gpt, precision="bf16")])
    assert layer_passes(gpt, device, engine("bundled"), bf16, cluster(8)).elementwise == free.elementwise


def test_a_format_that_the_device_lacks_is_named_with_those_it_has(a100):
    with pytest.raises(InputError, match=r"precision fp8: device a100-80gb .* use fp32, tf32, fp16, bf16$"):
        peak_flops(a100, "fp8")
