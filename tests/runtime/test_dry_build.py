"""Nothing that the planner offers can fail at start-up: the runtime builds every layout of its space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, note, settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.inputs.batch import Batch
from planner.inputs.pins import parse_pins
from planner.space.grid import build
from runtime.parallel.mesh import build_grid
from runtime.settings.checks import check_job
from runtime.train.stages import build_stage, executor_of

PINS = (
    "tp=2",
    "tp=4",
    "pp=2",
    "pp=4",
    "vpp=2",
    "zero_replicas=2",
    "cp=2",
    "cp=4",
    "cp_form=ring",
    "cp_form=all_to_all",
    "schedule=interleaved_zb",
    "schedule=zbv",
    "schedule=dualpipev",
    "recompute=selective",
    "recompute_modules=norm,activation",
    "recompute_method=block",
    "recompute_num_layers=2",
    "offload_activations=true",
    "offload_optimizer=true",
    "gradient_reduction=bf16",
    "optimizer=muon",
    "ep=2",
    "ep=4",
    "etp=2",
)
"""Degrees that a user may fix, also those that the search leaves alone."""


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """A small model of any kind that the runtime trains."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    kv_heads = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    gated = draw(st.booleans())
    seq = draw(st.sampled_from([8, 12, 32]))
    layers = draw(st.integers(1, 12))
    kinds = draw(st.sampled_from([{}, {}, LATENT, LATENT_QUERIES]))
    if kinds:
        kv_heads = heads
    return ModelSpec(
        name="drawn",
        layers=layers,
        hidden=heads * 8,
        heads=heads,
        kv_heads=kv_heads,
        ffn=draw(st.sampled_from([24, 32, 48])),
        vocab=draw(st.sampled_from([100, 129, 300])),
        seq=seq,
        gated=gated,
        activation="silu" if gated else draw(st.sampled_from(["gelu", "gelu_tanh", "relu2"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        position=draw(st.sampled_from(["learned", "rope", "none"])),
        tied=draw(st.booleans()),
        linear_bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        **kinds,
        **(draw(experts(layers)) if draw(st.booleans()) else {}),
    )


SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT: dict[str, Any] = {"latent_attention": {"q_lora_rank": 0, **SIZES}}
LATENT_QUERIES: dict[str, Any] = {"latent_attention": {"q_lora_rank": 20, **SIZES}}


@st.composite
def experts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Fields of a model with experts."""
    shared = draw(st.sampled_from([0, 0, 24, 48]))
    return {
        "experts": draw(st.sampled_from([2, 4, 6, 8])),
        "top_k": draw(st.sampled_from([1, 2])),
        "expert_ffn": draw(st.sampled_from([12, 16, 24])),
        "dense_layers": draw(st.integers(0, layers)),
        "shared_expert_ffn": shared,
        "shared_expert_gate": bool(shared) and draw(st.booleans()),
        "router": {
            "score": draw(st.sampled_from(["softmax", "sigmoid"])),
            "expert_bias": draw(st.booleans()),
            "capacity_factor": draw(st.sampled_from([0.0, 1.0])),
        },
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A model, and one of the layouts that the planner's space holds for it."""
    spec = draw(specs())
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 64]))
    batch = Batch(draw(st.sampled_from([1, 4, 6, 16, 64])), maximum=draw(st.booleans()))
    precision: Any = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    pins = draw(st.lists(st.sampled_from(PINS), max_size=3, unique_by=lambda pin: pin.partition("=")[0]))
    for wanted in (pins, []):
        try:
            table = build(spec, world_size, batch, precision, parse_pins(wanted)).table
        except InputError:
            continue
        if len(table):
            return spec, table.layout(draw(st.integers(0, len(table) - 1)))
    return spec, Layout(layers_per_stage=(spec.layers,), global_batch_size=1, precision=precision)


@contextmanager
def one_rank_of(world_size: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_build(spec: ModelSpec, layout: Layout, rank: int) -> None:
    """Build one rank's stages and schedule without memory, and check that it holds its layers."""
    with one_rank_of(layout.world_size, rank):
        check_job(spec, layout, layout.world_size)
        grid = build_grid(spec, layout, torch.device("cpu"))
        indices = layout.stages_of(grid.pp_rank)
        stages = [build_stage(spec, layout, grid, index, compiled=False) for index in indices]
        executor_of(stages, spec, layout, grid)
    held = [int(name) for stage in stages for name in stage.layers]
    assert held == [layer for index in indices for layer in layout.layer_range(index)]


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(problem=problems(), data=st.data())
def test_the_runtime_builds_what_the_planner_offers(
    problem: tuple[ModelSpec, Layout], data: st.DataObject
) -> None:
    spec, layout = problem
    note(layout.describe())
    dry_build(spec, layout, data.draw(st.integers(0, layout.world_size - 1)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"])
def test_stages_cover_all_layers_whatever_the_schedule(schedule: Any) -> None:
    spec = ModelSpec(name="eight", layers=8, hidden=16, heads=2, vocab=100, seq=8)
    chunks = 1 if schedule == "1f1b" else 2
    layout = Layout(
        pipeline_parallel=4,
        virtual_pipeline_parallel=chunks,
        schedule=schedule,
        layers_per_stage=(8 // (4 * chunks),) * (4 * chunks),
        global_batch_size=8,
        precision="fp32",
    )
    for rank in range(4):
        dry_build(spec, layout, rank)
    assert sorted(stage for rank in range(4) for stage in layout.stages_of(rank)) == list(range(4 * chunks))
