"""Constants come back from measurements that were made with them, and one wrong row bends none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costmodels import Device, Layout
from costmodels.calibration import machine_fit
from costmodels.calibration.machine_measurements import (
    AttentionTime,
    CallTime,
    Measurements,
    ProductTime,
    StepTime,
)
from costmodels.calibration.robust_fit import Knowledge, robust_fit
from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.spec.hardware import Precision

ENGINE = load_engine("bundled")
NANO = load_model("gpt2-nano")
RATE, LAUNCH = 2e10, 4e-5
"""FLOP/s and seconds of a product of the machine that is made up."""

BANDWIDTH, LATENCY = 3e8, 2e-3


def layouts(precision: Precision = "fp32") -> list[Layout]:
    """Layouts of two ranks."""
    plain: dict[str, Any] = {"layers_per_stage": (4,), "global_batch_size": 4, "precision": precision}
    found = [Layout(data_parallel=2, micro_batch_size=mbs, **plain) for mbs in (1, 2)]
    found += [Layout(data_parallel=2, micro_batch_size=mbs, zero_stage=1, **plain) for mbs in (1, 2)]
    found += [Layout(tensor_parallel=2, micro_batch_size=mbs, **plain) for mbs in (1, 2, 4)]
    split = plain | {"layers_per_stage": (2, 2)}
    return found + [Layout(pipeline_parallel=2, micro_batch_size=mbs, **split) for mbs in (1, 2)]


def kernels(**changes: object) -> Measurements:
    """Measurements of kernels whose constants are known."""
    products = []
    for m, k, n in ((128, 128, 512), (256, 512, 128), (512, 128, 128), (64, 64, 64)):
        seconds = 2.0 * m * k * n / RATE + LAUNCH
        products.append(ProductTime(m=m, k=k, n=n, forward_s=seconds, backward_s=2 * seconds))
    calls = [
        CallTime(
            collective="all_reduce",
            devices=2,
            message_bytes=size,
            seconds=LATENCY + size / BANDWIDTH,
        )
        for size in (1 << 12, 1 << 17, 1 << 21)
    ]
    attention = [AttentionTime(batch=1, heads=4, seq=128, head_dim=32, forward_s=1e-3, backward_s=2.5e-3)]
    fields = {
        "ranks": 2,
        "precision": "fp32",
        "products": tuple(products),
        "attention": tuple(attention),
        "copy_bytes_per_s": 5e9,
        "layer_host_s": 5e-4,
        "calls": tuple(calls),
    }
    return Measurements.model_validate(fields | changes)


def steps(device: Device, factor: float = 1.0) -> list[StepTime]:
    """The layouts' steps, as the model has them on `device`."""
    found = []
    for layout in layouts():
        step = StepTime(model=NANO, layout=layout, seconds=1.0)
        [batch] = machine_fit.batches_of([step])
        seconds = float(machine_fit.prices(batch, device, ENGINE, 2).step_time_s[0])
        found.append(step.model_copy(update={"seconds": factor * seconds}))
    return found


def test_kernels_say_rates_and_launches() -> None:
    device = machine_fit.fitted_device(load_device("cpu", 2), ENGINE, kernels())
    engine = ENGINE.for_device(device)
    assert engine.gemm.efficiency * device.peak_flops["fp32"] == pytest.approx(RATE, rel=1e-6)
    assert engine.gemm.launch == pytest.approx(LAUNCH, rel=1e-6)
    assert device.memory_bandwidth == 5e9 and engine.host.layer_overhead == 5e-4
    # 2 (n - 1) / n of a message of two ranks: all of it.
    assert device.intra_node.bandwidth == pytest.approx(BANDWIDTH, rel=1e-6)
    assert device.intra_node.latency == pytest.approx(LATENCY / 2, rel=1e-6)


def test_attention_takes_what_was_measured() -> None:
    device = machine_fit.fitted_device(load_device("cpu", 2), ENGINE, kernels())
    constants = ENGINE.for_device(device).attention
    flops = 2.0 * 4 * 128**2 * 32
    assert flops / (constants.efficiency * device.peak_flops["fp32"]) == pytest.approx(1e-3)
    # Backward is 2.5 times the work of forward, at the same rate here.
    assert constants.backward_rate == pytest.approx(1.0)


def test_steps_of_a_slower_machine_are_fitted() -> None:
    start = machine_fit.fitted_device(load_device("cpu", 2), ENGINE, kernels())
    slower = steps(start, factor=1.6)
    fitted = machine_fit.refitted_device(start, ENGINE, 2, slower)
    [batch] = machine_fit.batches_of(slower)
    before, after = (
        np.abs(np.log(machine_fit.prices(batch, one, ENGINE, 2).step_time_s / batch.seconds)).max()
        for one in (start, fitted)
    )
    assert after < 0.1 < before


def test_messages_of_ranks_that_compute_meanwhile_are_fitted_apart() -> None:
    start = machine_fit.fitted_device(load_device("cpu", 2), ENGINE, kernels())
    late = machine_fit.with_constants(start, ENGINE, {"network.meanwhile_latency": 5e-3})
    plain: dict[str, Any] = {"pipeline_parallel": 2, "global_batch_size": 4, "precision": "fp32"}
    piped = [
        Layout(layers_per_stage=(2, 2), **plain),
        Layout(layers_per_stage=(1, 1, 1, 1), virtual_pipeline_parallel=2, schedule="interleaved", **plain),
    ]
    [batch] = machine_fit.batches_of([StepTime(model=NANO, layout=layout, seconds=1.0) for layout in piped])
    waiting, computing = machine_fit.prices(batch, late, ENGINE, 2).step_time_s
    before = machine_fit.prices(batch, start, ENGINE, 2).step_time_s
    assert waiting == before[0] and computing > before[1] + 5e-3
    steps_of_both = [
        StepTime(model=NANO, layout=layout, seconds=float(seconds))
        for layout, seconds in zip(piped, (waiting, computing), strict=True)
    ]
    fitted = machine_fit.refitted_device(start, ENGINE, 2, steps_of_both)
    assert machine_fit.prices(batch, fitted, ENGINE, 2).step_time_s == pytest.approx(
        [waiting, computing], 0.05
    )


@pytest.mark.slow
def test_ranges_are_as_wide_as_what_is_left() -> None:
    start = machine_fit.fitted_device(load_device("cpu", 2), ENGINE, kernels())
    exact = machine_fit.refitted_device(start, ENGINE, 2, steps(start))
    noisy = [
        step.model_copy(update={"seconds": step.seconds * (3.0 if place % 2 else 0.5)})
        for place, step in enumerate(steps(start))
    ]
    wide = machine_fit.refitted_device(start, ENGINE, 2, noisy)
    spread = [ENGINE.for_device(device).spread.base for device in (exact, wide)]
    assert spread[0] == machine_fit.LEAST_SPREAD < 0.5 < spread[1]


@pytest.mark.slow
def test_what_a_rank_takes_besides_tensors_is_that_of_measured_peaks() -> None:
    start = machine_fit.fitted_device(load_device("cpu", 2), ENGINE, kernels())
    bare = start.model_copy(update={"context_bytes": 0.0})
    [batch] = machine_fit.batches_of(steps(start))
    tensors = machine_fit.prices(batch, bare, ENGINE, 2).peak_memory_bytes
    peaks = [
        step.model_copy(update={"peak_bytes": int(size + 3e8)})
        for step, size in zip(steps(start), tensors, strict=True)
    ]
    fitted = machine_fit.refitted_device(start, ENGINE, 2, peaks)
    assert fitted.context_bytes == pytest.approx(3e8, abs=2)


def test_a_gpu_keeps_the_peaks_of_its_data_sheet() -> None:
    plain = load_device("h100")
    found = kernels(precision="bf16", ranks=1, copy_bytes_per_s=2.8e12, calls=())
    device = machine_fit.fitted_device(plain, ENGINE, found)
    assert device.peak_flops == plain.peak_flops and device.memory_bandwidth == plain.memory_bandwidth
    share = ENGINE.for_device(device).elementwise.efficiency
    assert share == pytest.approx(2.8e12 / plain.memory_bandwidth)


def test_a_fit_finds_a_line_and_leaves_an_outlier() -> None:
    x = np.linspace(1.0, 5.0, 20)
    y = np.log(3.0 * x + 0.5)
    y[7] += 3.0
    known = {"slope": Knowledge(1.0, 3.0, 0.01, 100.0), "rest": Knowledge(1.0, 3.0, 0.01, 100.0)}
    found = robust_fit(known, lambda some: np.log(some["slope"] * x + some["rest"]) - y, 0.05)
    assert found["slope"] == pytest.approx(3.0, rel=0.05)


def test_a_fit_keeps_to_limits_and_to_what_is_known() -> None:
    capped = robust_fit({"a": Knowledge(0.5, 5.0, 0.1, 1.0)}, lambda some: np.log([some["a"] / 7.0]), 0.05)
    assert capped["a"] == pytest.approx(1.0)
    kept = robust_fit({"a": Knowledge(2.0, 0.3, 0.1, 9.0)}, lambda some: np.zeros(3), 0.05)
    assert kept["a"] == pytest.approx(2.0)
