"""Laws that no calibration may break: better hardware is never slower, more work never faster."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodels import Cluster, Engine, Layout, ModelSpec, even_split, price
from costmodels.catalogue import engine_names, load_device, load_engine, load_model
from costmodels.spec.hardware import Device, Link
from costmodels.spec.table import LayoutTable

DEVICES = ("a100-80g", "h100", "gb200", "gb300", "b200", "mi300x", "ascend-910b")

MODELS = ("gpt3-350m", "llama3-8b", "llama2-70b", "mixtral-8x7b")

TOLERANCE = 1e-9
"""Relative; sums are rounded."""

Job = tuple[ModelSpec, Cluster, Engine, Layout]


@functools.cache
def engine_of(name: str) -> Engine:
    return load_engine(name)


@functools.cache
def device_of(name: str) -> Device:
    return load_device(name)


@functools.cache
def model_of(name: str) -> ModelSpec:
    return load_model(name)


ENGINES = tuple(name for name in engine_names() if "bf16" in engine_of(name).memory)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job of 32 or 128 devices, which need not fit into memory."""
    model = model_of(draw(st.sampled_from(MODELS)))
    device, engine = device_of(draw(st.sampled_from(DEVICES))), engine_of(draw(st.sampled_from(ENGINES)))
    tp, pp = draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from((1, 2, 4)))
    world = draw(st.sampled_from((32, 128)))
    vpp = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    dp = world // (tp * pp)
    micro = draw(st.sampled_from((1, 4)))
    layout = Layout(
        tensor_parallel=tp,
        sequence_parallel=tp > 1,
        pipeline_parallel=pp,
        virtual_pipeline_parallel=vpp,
        schedule="interleaved" if vpp > 1 else "1f1b",
        expert_parallel=draw(st.sampled_from((1, min(dp, 8)))) if model.experts else 1,
        data_parallel=dp,
        zero_stage=draw(st.sampled_from((0, 1) if pp > 1 else (0, 1, 3))) if dp > 1 else 0,
        micro_batch_size=micro,
        global_batch_size=dp * micro * draw(st.sampled_from((pp, 4 * pp))),
        recompute=draw(st.sampled_from(("none", "full"))),
        layers_per_stage=even_split(model.layers, pp * vpp),
    )
    return model, on(device, world), engine, layout


def on(device: Device, world: int, local: int | None = None) -> Cluster:
    return Cluster(
        device=device,
        world_size=world,
        devices_per_node=local or device.devices_per_node,
        memory_bytes=device.memory_bytes,
    )


def seconds(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> float:
    """The step, its pipeline by the closed form that ranks all layouts."""
    return float(price(model, cluster, engine, LayoutTable.of([layout])).step_time_s[0])


def with_device(cluster: Cluster, **changes: Any) -> Cluster:
    return on(cluster.device.model_copy(update=changes), cluster.world_size)


def with_link(cluster: Cluster, tier: str, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    link: Link = getattr(cluster.device, tier)
    better = {"bandwidth": link.bandwidth * bandwidth, "latency": link.latency * latency}
    return with_device(cluster, **{tier: link.model_copy(update=better)})


FEW_EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@FEW_EXAMPLES
@given(job=jobs(), factor=st.floats(1.0, 4.0))
def test_better_hardware_is_never_slower(job: Job, factor: float) -> None:
    model, cluster, engine, layout = job
    before = seconds(*job) * (1 + TOLERANCE)
    device = cluster.device
    peaks = {name: rate * factor for name, rate in device.peak_flops.items()}
    better = {
        "FLOP/s": with_device(cluster, peak_flops=peaks),
        "bandwidth of memory": with_device(cluster, memory_bandwidth=device.memory_bandwidth * factor),
        "memory": with_device(cluster, memory_bytes=device.memory_bytes * factor),
        "bandwidth in a node": with_link(cluster, "intra_node", bandwidth=factor),
        "bandwidth between nodes": with_link(cluster, "inter_node", bandwidth=factor),
        "latency in a node": with_link(cluster, "intra_node", latency=1 / factor),
        "latency between nodes": with_link(cluster, "inter_node", latency=1 / factor),
    }
    for what, other in better.items():
        assert seconds(model, other, engine, layout) <= before, what


@pytest.mark.slow
@FEW_EXAMPLES
@given(job=jobs(), times=st.sampled_from((2, 4)))
def test_longer_sequences_and_larger_batches_are_never_faster(job: Job, times: int) -> None:
    model, cluster, engine, layout = job
    before = seconds(*job) * (1 - TOLERANCE)
    seq = model.seq * times
    longer = model.model_copy(update={"seq": seq, "max_positions": max(seq, model.max_positions)})
    assert seconds(longer, cluster, engine, layout) >= before
    batch = layout.model_copy(update={"global_batch_size": layout.global_batch_size * times})
    assert seconds(model, cluster, engine, batch) >= before


@pytest.mark.slow
@FEW_EXAMPLES
@given(job=jobs(), field=st.sampled_from(("peak_flops", "memory_bandwidth", "intra_node", "inter_node")))
def test_a_little_more_of_anything_changes_little(job: Job, field: str) -> None:
    model, cluster, engine, layout = job
    little = 1 + 1e-6
    value = getattr(cluster.device, field)
    if isinstance(value, Link):
        other = with_link(cluster, field, bandwidth=little)
    elif isinstance(value, dict):
        other = with_device(cluster, **{field: {name: rate * little for name, rate in value.items()}})
    else:
        other = with_device(cluster, **{field: value * little})
    assert seconds(model, other, engine, layout) == pytest.approx(seconds(*job), rel=1e-5)


@pytest.mark.parametrize("engine", ["megatron", "nemo", "nanotron", "bundled"])
def test_a_border_between_nodes_with_equal_links_changes_nothing(engine: str) -> None:
    model, device = model_of("llama3-8b"), device_of("h100")
    even = device.model_copy(update={"inter_node": device.intra_node})
    layout = Layout(
        tensor_parallel=8,
        sequence_parallel=True,
        data_parallel=4,
        zero_stage=1,
        micro_batch_size=1,
        global_batch_size=16,
        layers_per_stage=even_split(model.layers, 1),
    )
    steps = [seconds(model, on(even, 32, local), engine_of(engine), layout) for local in (4, 8, 16, 32)]
    assert np.ptp(steps) <= TOLERANCE * steps[0]
