"""A device that is at least as good in every figure of its data sheet is never predicted slower."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import Any

import pytest

from costmodels import Cluster, Device, Layout, Link, even_split, price
from costmodels.catalogue import device_names, engine_names, load_device, load_engine, load_model
from costmodels.spec.hardware import Precision
from costmodels.spec.table import LayoutTable

GPT = load_model("gpt-22b")
USUAL = ("bundled", "megatron")
"""Engines of the inner loop."""

LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 8, "pipeline_parallel": 2, "micro_batch_size": 2},
    {"tensor_parallel": 2, "data_parallel": 8, "zero_stage": 3},
    {"data_parallel": 16, "zero_stage": 1, "recompute": "full"},
    {"tensor_parallel": 16},  # Bound by the links.
]


def covers(better: Link, lesser: Link) -> bool:
    return better.bandwidth >= lesser.bandwidth and better.latency <= lesser.latency


def dominates(better: Device, lesser: Device) -> bool:
    """Return whether `better` is of the same vendor and at least as good in every figure that takes time."""
    return (
        better.vendor == lesser.vendor
        and all(better.peak_flops.get(kind, 0) >= peak for kind, peak in lesser.peak_flops.items())
        and better.memory_bandwidth >= lesser.memory_bandwidth
        and (better.island or better.devices_per_node) >= (lesser.island or lesser.devices_per_node)
        and covers(better.intra_node, lesser.intra_node)
        and covers(better.inter_node, lesser.inter_node)
    )


DEVICES = [load_device(name) for name in device_names() if name != "cpu"]
PAIRS = [(a, b) for a, b in permutations(DEVICES, 2) if dominates(a, b)]


@cache
def step_times(name: str, engine: str, precision: Precision) -> list[float]:
    """Seconds of a step of each of `LAYOUTS` on 16 devices."""
    device = load_device(name)
    cluster = Cluster(device=device, world_size=16, devices_per_node=8, memory_bytes=device.memory_bytes)
    layouts = [
        Layout.model_validate(
            {
                **degrees,
                "layers_per_stage": even_split(GPT.layers, degrees.get("pipeline_parallel", 1)),
                "global_batch_size": 64,
                "precision": precision,
            }
        )
        for degrees in LAYOUTS
    ]
    prices = price(GPT, cluster, load_engine(engine), LayoutTable.of(layouts))
    return [float(seconds) for seconds in prices.step_time_s]


def test_the_pairs_hold_the_successors_that_vendors_name() -> None:
    names = {(better.name, lesser.name) for better, lesser in PAIRS}
    assert names >= {
        ("h200", "h100"),
        ("b200", "h200"),
        ("h100", "a100-80g"),
        ("a100-80g", "a100-40g"),
        ("v100-32g", "v100-16g"),
        ("h100", "h800"),
        ("mi300x", "mi250x"),
        ("ascend-910b", "ascend-910"),
    }


@pytest.mark.parametrize(
    "engine",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in engine_names()],
)
def test_a_better_device_is_never_slower(engine: str) -> None:
    slower = []
    for better, lesser in PAIRS:
        for precision in lesser.peak_flops:
            if precision == "tf32" or precision not in load_engine(engine).memory:
                continue
            times = zip(
                step_times(better.name, engine, precision),
                step_times(lesser.name, engine, precision),
                LAYOUTS,
                strict=True,
            )
            slower += [
                (better.name, lesser.name, precision, degrees)
                for ours, theirs, degrees in times
                if ours > theirs * (1 + 1e-9)
            ]
    assert not slower


@pytest.mark.parametrize(("name", "like"), [("gu100", "a100-80g"), ("gu50", "a100-40g")])
@pytest.mark.parametrize("engine", engine_names())
def test_a_device_that_is_said_to_be_another_costs_the_same(name: str, like: str, engine: str) -> None:
    ours, theirs = (step_times(device, engine, "bf16") for device in (name, like))
    assert ours == theirs


def test_an_h200_is_faster_than_an_h100_where_memory_bandwidth_counts() -> None:
    for engine in ("bundled", "megatron"):
        h200, h100 = (step_times(name, engine, "bf16") for name in ("h200", "h100"))
        assert all(ours < theirs for ours, theirs in zip(h200, h100, strict=True))
