"""Layouts as they are printed: pasted into a question, they are the layouts that were printed."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from costmodels.errors import InputError
from costmodels.spec.layout import Layout
from planner.inputs.layout_notation import degrees_in, micro_batches_in
from planner.inputs.written_layout import whole_layout_pins

JOB: dict[str, Any] = {"model": "llama3-8b", "device": "h100"}


@pytest.mark.parametrize("prefer", ["simple", "fastest"])
@pytest.mark.parametrize("pin", [None, "schedule=zbv", "cp=2", "recompute=full", "optimizer=muon", "etp=1"])
def test_a_printed_layout_costs_what_the_plan_says(pin, prefer):
    found = planner.search(**JOB, world_size=16, global_batch_size=64, pin=pin, prefer=prefer)
    for plan in found.plans(3):
        again = planner.evaluate(plan.layout.describe(), **JOB)
        assert again == plan.estimate
        pinned = planner.search(**JOB, world_size=16, global_batch_size=64, pin=plan.layout.describe())
        assert plan.layout in [one.layout for one in pinned.plans(20)]


def test_unequal_stages_are_written_and_read():
    found = planner.search(**JOB, world_size=16, global_batch_size=128)
    texts = {plan.layout.describe(): plan for plan in found.plans(20)}
    assert len(texts) == 20  # No two plans are written in the same words.
    uneven = [plan for plan in texts.values() if len(set(plan.layout.layers_per_stage)) > 1]
    assert uneven
    for plan in uneven[:4]:
        [written] = degrees_in(plan.layout.describe().split()[-1])
        assert sum(map(int, written.removeprefix("layers_per_stage=").split(","))) == 32
        assert planner.evaluate(plan.layout.describe(), **JOB) == plan.estimate


def test_layers_of_stages_are_a_sum():
    [pinned] = degrees_in("layers=4+5*3+1")
    assert pinned == "layers_per_stage=4,5,5,5,1"
    assert list(degrees_in("pp=2, layers=17,15")) == ["pp=2", "layers_per_stage=17,15"]


def test_what_is_left_out_follows_from_the_job():
    layout = Layout(
        tensor_parallel=4,
        pipeline_parallel=2,
        virtual_pipeline_parallel=2,
        schedule="interleaved",
        data_parallel=2,
        global_batch_size=32,
        layers_per_stage=(8,) * 4,
        precision="bf16",
    )
    whole = planner.evaluate(layout, **JOB)
    assert planner.evaluate("tp=4,pp=2,vpp=2", **JOB, world_size=16, global_batch_size=32) == whole
    assert planner.evaluate("tp=4 pp=2 vpp=2 dp=2 mbs=1 x 16", **JOB) == whole


def test_recomputation_that_a_whole_layout_does_not_name_is_chosen():
    text = "tp=1 pp=1 dp=16 mbs=1 x 8"
    job = JOB | {"world_size": 16, "global_batch_size": 128}
    found = planner.search(**job, pin=[text, *whole_layout_pins(text)]).best
    by_degrees = planner.search(**job, pin=["tp=1", "pp=1", "cp=1", "mbs=1"]).best
    assert found.layout == by_degrees.layout and "norm" in found.layout.recompute_modules


@pytest.mark.parametrize(
    ("text", "more", "line"),
    [
        ("tp=4", {}, "layout tp=4: its other degrees take 4 devices: give world_size or"),
        ("tp=3", {"world_size": 16}, "layout tp=3: its other degrees take 3 devices: no divisor"),
        ("tp=4 dp=4", {}, "layout tp=4 dp=4: say how many sequences a step has, by"),
        ("tp=2..4", {"world_size": 8}, "layout tp=2..4: expected one value of tensor_parallel,"),
        ("tp=2 mbs=1..2", {"world_size": 8}, "layout tp=2 mbs=1..2: expected one value of micro_batch_size,"),
        ("dp=2..4 mbs=1 x 8", {}, "layout dp=2..4 mbs=1 x 8: expected one value of data_parallel,"),
        ("recompute=none,full", {}, "layout recompute=none,full: expected one value of recompute,"),
        ("tp=2", {"world_size": "8"}, "world_size '8': expected a whole number"),
        ("dp=2", {"global_batch_size": 0}, "global_batch_size 0: expected a whole number"),
        ("dp=2 gbs=16", {"global_batch_size": 8}, "layout dp=2 gbs=16: its global_batch_size contradicts"),
        ("dp=2 precision=bf16", {"precision": "fp32", "global_batch_size": 8}, "layout dp=2 pre"),
        ({"tp": 2}, {"world_size": 8, "global_batch_size": 8}, "layout {'tp': 2}: expected a Layout"),
        ("tp=x", {}, "layout: tensor_parallel=x: expected a whole number"),
        ("dp=2 layers=x*2", {}, "layout: layers_per_stage=x*2: expected layers of each stage"),
        ("pp=2 layers=16*3", {"world_size": 8}, "layout pp=2 layers=16*3: "),
        ("fast", {}, "layout: 'fast': expected name=value"),
        ("dp=2 mbs=3", {"global_batch_size": 8}, "layout dp=2 mbs=3: "),
    ],
)  # fmt: skip
def test_what_is_no_layout_ends_in_one_line(text, more, line):
    with pytest.raises(InputError) as error:
        planner.evaluate(text, **JOB, **more)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_words_of_a_layout():
    assert list(degrees_in("tp=4+sp pp=8")) == ["tp=4", "sp=true", "pp=8"]
    assert list(degrees_in("offload=activations+optimizer cuda_graphs")) == [
        "offload_activations=true",
        "offload_optimizer=true",
        "cuda_graphs=true",
    ]
    assert micro_batches_in("dp=2 mbs=1 x 8 recompute=none") == 8 and micro_batches_in("mbs=1") is None
