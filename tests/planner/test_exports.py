"""Plans as flags and files of other software: what is read back is the plan, but for what is named."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodels import ModelSpec
from costmodels.spec.layout import Layout
from planner import Plan, search
from planner.formats.export import Export
from planner.formats.files import read_files
from planner.formats.reading import Reading
from planner.formats.targets import TARGETS
from planner.formats.targets import export as export_plan
from planner.formats.torchtitan_names import less_layers, stage_layers
from planner.inputs.huggingface.readers import model_fields
from planner.ranking.result import SearchResult
from tests.support.models import llama

LLAMA = llama("small", layers=8, hidden=1024, heads=8, kv_heads=4, vocab=32000, seq=2048)
GPT = ModelSpec(name="gpt", layers=8, hidden=1024, heads=8, vocab=32000, seq=2048, activation="gelu_tanh")
EXPERTS = LLAMA.model_copy(
    update={"name": "mixture", "experts": 8, "expert_ffn": 1024, "top_k": 2, "ffn": 1024}
)
MODELS = (LLAMA, GPT, EXPERTS)

ENGINES = {
    "megatron": "megatron",
    "megatron-bridge": "nemo",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "nanotron": "nanotron",
    "mindspeed": "mindspeed",
    "mindformers": "mindformers",
    "accelerate": "accelerate",
}
"""The engine whose layouts each software runs."""

SUFFIXES = {"megatron": "sh", "mindspeed": "sh", "torchtitan": "sh", "deepspeed": "json"}
"""Endings of files that are not YAML."""

READ = tuple(ENGINES)
"""Software whose files are read, too."""

SIZES = (
    *(
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "seq",
        "gated",
        "norm",
        "position",
    ),
    *(
        "tied",
        "linear_bias",
        "qkv_bias",
        "experts",
        "top_k",
        "expert_ffn",
        "shared_expert_ffn",
        "dense_layers",
    ),
)
"""Fields of a model that decide what is computed."""

WORLD = 16


@cache
def found(engine: str, model: ModelSpec, memory_gib: float) -> SearchResult:
    """All layouts of an engine that are legal."""
    device = "ascend-910b" if engine in ("mindspeed", "mindformers") else "a100-80g"
    job: dict[str, Any] = {"world_size": WORLD, "max_global_batch_size": 64, "precision": "bf16"}
    return search(model, engine=engine, device=device, device_memory_gib=memory_gib, **job)


@st.composite
def plans(draw: st.DrawFn, engine: str) -> Plan:
    """A layout of the planner's own space, with so little memory that some recompute or offload."""
    model = draw(st.sampled_from(MODELS))
    result = found(engine, model, 3.0)
    layout = result.table.layout(draw(st.integers(0, len(result.table) - 1)))
    base = result.best or result.closest(1)[0]
    return base.model_copy(update={"layout": layout})


def read_again(export: Export, plan: Plan, folder: Path) -> Reading:
    """The job of an export's file; its model is described beside it where the file cannot."""
    file = folder / f"config.{SUFFIXES.get(export.target, 'yaml')}"
    file.write_text(export.text)
    files = [file]
    if any(text.startswith(("model ", "router ", "activation ")) for text in export.inexpressible):
        files.append(folder / "model.yaml")
        files[-1].write_text(yaml.safe_dump(plan.model.model_dump(mode="json", exclude_none=True)))
    return read_files(files, world_size=plan.layout.world_size)


@pytest.mark.parametrize("target", READ)
@given(data=st.data())
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_read_again_is_the_plan(target: str, data: st.DataObject, tmp_path: Path) -> None:
    plan = data.draw(plans(ENGINES[target]))
    export = TARGETS[target](plan)
    reading = read_again(export, plan, tmp_path)
    layout, model = reading.layout, reading.model
    assert layout is not None and model is not None
    assert {name: getattr(model, name) for name in SIZES} == {
        name: getattr(plan.model, name) for name in SIZES
    }
    lost = export.inexpressible_fields
    expected, got = (
        {name: value for name, value in each.model_dump().items() if name not in lost}
        for each in (plan.layout, layout)
    )
    assert got == expected


@given(layers=st.lists(st.integers(1, 6), min_size=2, max_size=8))
def test_layers_of_torchtitan_are_shared_out_as_it_does(layers: list[int]) -> None:
    listed = tuple(layers)
    found = less_layers(listed)
    if found is not None:
        each, first, last = found
        assert stage_layers(sum(listed), len(listed), first, last) == listed
        assert -(-(sum(listed) + first + last) // each) == len(listed)
    if max(listed) == min(listed):
        assert found == (listed[0], 0, 0)


@pytest.mark.parametrize("target", TARGETS)
def test_every_field_that_is_not_usual_is_said_or_named(target: str) -> None:
    plan = found(ENGINES[target], EXPERTS, 60.0).best
    assert plan is not None
    usual = TARGETS[target](plan.model_copy(update={"layout": LAYOUT}))
    for field, value in UNUSUAL.items():
        export = TARGETS[target](plan.model_copy(update={"layout": LAYOUT.model_copy(update=value)}))
        said = export.layout_flags != usual.layout_flags
        assert said or field in export.inexpressible_fields | usual.inexpressible_fields, field


@pytest.mark.parametrize("target", TARGETS)
def test_modules_for_further_tokens_are_said_or_named(target: str) -> None:
    plan = found(ENGINES[target], EXPERTS, 60.0).best
    assert plan is not None
    model = ModelSpec.model_validate({**EXPERTS.model_dump(), "mtp": {"depths": 2}})
    export = TARGETS[target](plan.model_copy(update={"model": model}))
    whole = export_plan(plan.model_copy(update={"model": model}), to=target)
    said = "mtp-num-layers 2" in export.text or "mtp_num_layers: 2" in export.text
    assert said != any(one.startswith("mtp=2") for one in whole.inexpressible)
    assert said == (target in ("megatron", "megatron-bridge", "mindspeed"))


@pytest.mark.parametrize("target", ["megatron", "megatron-bridge", "mindspeed", "mindformers", "nanotron"])
def test_a_form_of_attention_without_words_is_named(target: str) -> None:
    plan = found(ENGINES[target], EXPERTS, 60.0).best
    assert plan is not None
    model = ModelSpec(**model_fields({"model_type": "deepseek_v4"}), name="v4", seq=4096)
    export = TARGETS[target](plan.model_copy(update={"model": model}))
    named = ("compressed_attention", "model v4")
    assert any(one.startswith(named) for one in export.inexpressible)


LAYOUT = Layout(
    tensor_parallel=2,
    pipeline_parallel=2,
    context_parallel=2,
    expert_parallel=2,
    expert_tensor_parallel=2,
    data_parallel=4,
    zero_stage=1,
    layers_per_stage=(4, 4),
    micro_batch_size=1,
    global_batch_size=16,
)
UNUSUAL: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"tensor_parallel": 4},
    "sequence_parallel": {"sequence_parallel": True},
    "pipeline_parallel": {"pipeline_parallel": 4, "layers_per_stage": (2, 2, 2, 2)},
    "context_parallel": {"context_parallel": 4},
    "context_parallel_form": {"context_parallel_form": "ring"},
    "expert_parallel": {"expert_parallel": 4},
    "expert_tensor_parallel": {"expert_tensor_parallel": 4},
    "zero_stage": {"zero_stage": 3},
    "zero_replicas": {"zero_replicas": 2},
    "schedule": {"schedule": "zbv", "virtual_pipeline_parallel": 2, "layers_per_stage": (2, 2, 2, 2)},
    "layers_per_stage": {"layers_per_stage": (5, 3)},
    "micro_batch_size": {"micro_batch_size": 2},
    "global_batch_size": {"global_batch_size": 32},
    "recompute": {"recompute": "full"},
    "recompute_modules": {"recompute": "selective", "recompute_modules": ("norm",)},
    "recompute_method": {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "recompute_num_layers": {"recompute": "full", "recompute_num_layers": 2},
    "offload_activations": {"offload_activations": True},
    "offload_optimizer": {"offload_optimizer": True},
    "precision": {"precision": "fp8"},
    "gradient_reduction": {"gradient_reduction": "bf16"},
    "fp8_recipe": {"precision": "fp8", "fp8_recipe": "blockwise"},
    "fp8_param_gather": {"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "optimizer": {"optimizer": "muon"},
    "expert_halves": {"expert_halves": True, "expert_parallel": 4},
    "cuda_graphs": {"cuda_graphs": True},
}


def test_files_are_of_their_format() -> None:
    for target, engine in ENGINES.items():
        plan = found(engine, LLAMA, 60.0).best
        assert plan is not None
        text = TARGETS[target](plan).text
        if target == "deepspeed":
            assert json.loads(text)["train_batch_size"] == plan.layout.global_batch_size
        elif target not in SUFFIXES:
            assert isinstance(yaml.safe_load(text), dict) and "&id" not in text
