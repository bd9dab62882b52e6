"""Plans as flags and files of other software: what is read back is the plan, but for what is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from costmodels import ModelSpec
from costmodels.pricing import estimate
from costmodels.spec.layout import Layout
from costmodels.spec.model_parts import RopeScaling
from planner import Plan, search
from planner.formats.check import name_what_is_missing, plan_as_it_stands, problem_of_reading
from planner.formats.facts.reading import Problems, Reading, verdict
from planner.formats.files import read_files
from planner.formats.nearest import Inexpressible, check_expressible
from planner.formats.targets import TARGETS
from planner.formats.targets import export as export_plan
from planner.formats.writing.export import Export
from planner.formats.writing.model_words import model_parts
from planner.inputs.huggingface.readers import model_fields
from planner.ranking.result import SearchResult
from planner.space.shared_stages import less_layers, shared_splits, stage_layers
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


def read_again(export: Export, plan: Plan, folder: Path, define: Mapping[str, str] | None = None) -> Reading:
    """The job of an export's file; its model is described beside it where its software takes none from it."""
    file = folder / f"config.{SUFFIXES.get(export.target, 'yaml')}"
    file.write_text(export.text)
    files = [file]
    if any(text.startswith("model ") for text in (*export.inexpressible, *export.in_script)):
        files.append(folder / "model.yaml")
        files[-1].write_text(yaml.safe_dump(plan.model.model_dump(mode="json", exclude_none=True)))
    return read_files(files, world_size=plan.layout.world_size, define=define)


def differing(plan: Plan, reading: Reading) -> set[str]:
    """Fields of the layout and parts of the model that are not read back as they are in the plan."""
    assert reading.layout is not None and reading.model is not None, reading.problems
    pairs = (
        (plan.layout.model_dump(), reading.layout.model_dump()),
        (model_parts(plan.model), model_parts(reading.model)),
    )
    found = set()
    for one, other in (*pairs, *(pair[::-1] for pair in pairs)):
        for name, value in one.items():
            # A key that the other lacks has no effect there, because of another part, which is compared too.
            known = name if name in other else name.partition(".")[0]
            if known in other and value != other[known]:
                found.add(name)
    return found


def unnamed(export: Export, names: set[str]) -> set[str]:
    """The `names` that an export names neither by themselves nor by the record that they belong to."""
    return {name for name in names if not {name, name.partition(".")[0]} & export.named}


DRAWS = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("target", READ)
@given(data=st.data())
@DRAWS
def test_what_is_read_again_is_the_plan(target: str, data: st.DataObject, tmp_path: Path) -> None:
    plan = data.draw(plans(ENGINES[target]))
    export = export_plan(plan, to=target)
    assert unnamed(export, differing(plan, read_again(export, plan, tmp_path))) == set()


IN_SCRIPT: dict[str, Callable[[Layout], dict[str, int]]] = {
    "micro_batch_size": lambda layout: {"per_device_train_batch_size": layout.micro_batch_size},
    "global_batch_size": lambda layout: {"gradient_accumulation_steps": layout.micro_batches},
}
"""Keys of a training script that stand for fields of a layout."""


@pytest.mark.parametrize("target", READ)
@given(data=st.data())
@settings(parent=DRAWS, max_examples=15)
def test_what_is_written_is_legal_and_costs_what_was_priced(
    target: str, data: st.DataObject, tmp_path: Path
) -> None:
    plan = data.draw(plans(ENGINES[target]))
    export = export_plan(plan, to=target)
    if any(not text.startswith("model ") for text in export.inexpressible):
        return  # The written job is another one.
    said = {text.partition("=")[0] for text in export.in_script} & IN_SCRIPT.keys()
    define = {name: str(value) for one in said for name, value in IN_SCRIPT[one](plan.layout).items()}
    reading = read_again(export, plan, tmp_path, define)
    problems = Problems(reading.file, list(reading.problems))
    name_what_is_missing(reading, problems)
    assert verdict(problems.found)[0] is True, problems.found
    problem, _ = problem_of_reading(
        reading, {"device": plan.cluster.device.name, "engine": plan.engine.name, "device_memory_gib": 60.0}
    )
    assert reading.layout is not None
    again = plan_as_it_stands(reading, reading.layout, problem, problems)
    assert again is not None and verdict(problems.found)[0] is True, problems.found
    priced = estimate(plan.model, plan.cluster, plan.engine, plan.layout)
    assert again.estimate.step_time_s == pytest.approx(priced.step_time_s, rel=1e-6)
    assert again.estimate.peak_memory_bytes == pytest.approx(priced.peak_memory_bytes, rel=1e-6)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 128, "attention_pattern": ("window", "full")},
    "windows": {"window": 64, "attention_pattern": ("window", "window", "window", "full")},
    "all windows": {"window": 128, "attention_pattern": ("window",)},
    "chunks": {"window": 128, "attention_pattern": ("chunk", "full")},
    "windows and chunks": {"window": 128, "attention_pattern": ("window", "chunk", "full", "full")},
    "linear": {
        "attention_pattern": ("linear", "linear", "linear", "full"),
        "linear_attention": {
            "kind": "gated_delta",
            "key_heads": 4,
            "value_heads": 8,
            "key_dim": 64,
            "value_dim": 128,
            "conv_kernel": 3,
        },
    },
    "mamba": {
        "attention_pattern": ("linear", "full"),
        "linear_attention": {
            "kind": "mamba2",
            "key_heads": 4,
            "value_heads": 8,
            "key_dim": 64,
            "value_dim": 128,
        },
    },
    "no attention": {"attention_pattern": ("none", "full")},
    "qk_norm": {"qk_norm": True},
    "qk_norm of all": {"qk_norm": True, "qk_norm_width": "all"},
    "qk_norm without weights": {"qk_norm": True, "qk_norm_weights": False},
    "gate": {"attention_gate": True},
    "sinks": {"attention_sinks": True},
    "softcaps": {"attention_softcap": 50.0, "logits_softcap": 30.0},
    "score_scale": {"score_scale": 0.05},
    "score_growth": {"score_growth": {"positions": 8192, "factor": 0.1}},
    "rotary_dim": {"rotary_dim": 64},
    "rope_theta": {"rope_theta": 1234567.5},
    "llama3": {"rope_scaling": {"kind": "llama3", "factor": 8.0, "original_positions": 8192}},
    "llama3 of its own": {"rope_scaling": {"kind": "llama3", "factor": 8.0, "original_positions": 4096}},
    "linear scaling": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "yarn": {
        "rope_scaling": {
            "kind": "yarn",
            "factor": 32.0,
            "original_positions": 4096,
            "beta_fast": 16.0,
            "truncate": False,
        }
    },
    "no rope in full": {"window": 128, "attention_pattern": ("window", "full"), "rotates_full": False},
    "no layer in full": {"window": 128, "attention_pattern": ("window",), "rotates_full": False},
    "two bases": {"window": 128, "attention_pattern": ("window", "full"), "window_rope_theta": 5000.0},
    "norms after": {"norm_place": "after"},
    "norm_from_one": {"norm_from_one": True},
    "norm_eps": {"norm_eps": 1e-6},
    "geglu": {"gated": True, "activation": "gelu_tanh"},
    "clamped": {"gated": True, "activation": "clamped_silu"},
    "relu2": {"gated": False, "activation": "relu2"},
    "tied": {"tied": True},
    "qkv_bias": {"qkv_bias": True},
    "output_bias": {"output_bias": True},
    "scales": {"embedding_scale": 12.0, "residual_scale": 0.22, "logits_scale": 0.125},
    "streams": {"residual_streams": 4},
    "parallel": {"parallel_residual": True},
    "others": {"other_layer_parameters": 1000, "other_parameters": 5000},
    "no positions": {"position": "none"},
    "heads": {"head_dim": 64},
    "positions": {"max_positions": 8192},
    "latent": {
        "head_dim": 192,
        "kv_heads": 8,
        "latent_attention": {
            "q_lora_rank": 64,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    },
    "indexer": {
        "head_dim": 192,
        "kv_heads": 8,
        "latent_attention": {
            "q_lora_rank": 64,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        "indexer": {"heads": 8, "head_dim": 64, "top_k": 256},
    },
}
"""Forms of models, by their unusual feature."""

EXPERT_FEATURES: dict[str, dict[str, Any]] = {
    "dense layers": {"dense_layers": 3},
    "mixed layers": {"mlp_pattern": ("dense", "experts")},
    "layers without": {"mlp_pattern": ("experts", "none")},
    "shared": {"shared_expert_ffn": 2048, "shared_expert_gate": True},
    "some shared": {"shared_expert_ffn": 1536},
    "sigmoid": {"router": {"score": "sigmoid", "expert_bias": True, "scale": 2.5}},
    "plain sigmoid": {"router": {"score": "sigmoid", "normalised": False}},
    "softmax before": {"router": {"normalised": False}},
    "biased softmax": {"router": {"expert_bias": True}},
    "router bias": {"router": {"bias": True}},
    "roots": {"router": {"score": "sqrtsoftplus"}},
    "groups": {"router": {"groups": 4, "top_groups": 2}},
    "groups by two": {"router": {"groups": 4, "top_groups": 2, "group_score": "top2"}},
    "capacity": {"router": {"capacity_factor": 1.25}},
    "one expert": {"top_k": 1, "router": {"score": "sigmoid", "normalised": False, "weighs_inputs": True}},
    "one by softmax": {"top_k": 1},
    "weighed inputs": {"router": {"weighs_inputs": True}},
}


@st.composite
def any_plans(draw: st.DrawFn, target: str) -> Plan:
    """A plan of any model and layout, be the software able to run it or not."""
    model = draw(st.sampled_from(MODELS))
    features = FEATURES | (EXPERT_FEATURES if model.experts else {})
    values = model.model_dump()
    for name in draw(st.lists(st.sampled_from(sorted(features)), max_size=3, unique=True)):
        values |= features[name]
    try:
        model = ModelSpec.model_validate(values)
        layout = LAYOUT.model_dump()
        for name in draw(st.lists(st.sampled_from(sorted(UNUSUAL)), max_size=2, unique=True)):
            layout |= UNUSUAL[name]
        if not model.experts:
            layout |= {"expert_parallel": 1, "expert_tensor_parallel": 1, "expert_halves": False}
        built = Layout.model_validate(layout)
    except ValueError:
        reject()
    base = found(ENGINES[target], LLAMA, 60.0).best
    assert base is not None
    return base.model_copy(update={"model": model, "layout": built})


KIMI = {"kind": "yarn", "factor": 32.0, "original_positions": 4096, "beta_fast": 1.0, "mscale": 1.0}


def test_a_scaling_without_flags_is_refused_for_its_values_and_is_fields_of_megatron_bridge(
    tmp_path: Path,
) -> None:
    base = found(ENGINES["megatron-bridge"], LLAMA, 60.0).best
    assert base is not None
    values = LLAMA.model_dump() | FEATURES["latent"] | {"rope_scaling": KIMI | {"mscale_all_dim": 1.0}}
    plan = base.model_copy(update={"model": ModelSpec.model_validate(values)})
    refused = export_plan(plan, to="megatron").inexpressible
    assert "rope_scaling=yarn: beta_fast is always 32 there, not 1" in refused
    written = export_plan(plan, to="megatron-bridge")
    assert not written.inexpressible
    reading = read_again(written, plan, tmp_path)
    assert reading.model is not None and reading.model.rope_scaling == plan.model.rope_scaling
    linear = plan.model.model_copy(update={"rope_scaling": RopeScaling(kind="linear", factor=2.0)})
    refused = export_plan(plan.model_copy(update={"model": linear}), to="megatron").inexpressible
    assert "rope_scaling=linear: it scales positions by yarn alone with latent attention" in refused


@pytest.mark.parametrize("feature", ["mixed layers", "dense layers"])
def test_lists_of_layers_with_experts_come_back_from_yaml(feature: str, tmp_path: Path) -> None:
    base = found(ENGINES["megatron-bridge"], LLAMA, 60.0).best
    assert base is not None
    mixture = next(model for model in MODELS if model.experts)
    model = ModelSpec.model_validate(mixture.model_dump() | EXPERT_FEATURES[feature])
    plan = base.model_copy(update={"model": model, "layout": LAYOUT})
    reading = read_again(export_plan(plan, to="megatron-bridge"), plan, tmp_path)
    assert reading.model is not None and reading.layout is not None, reading.problems
    kinds = [[one.layer_kind(layer) for layer in range(one.layers)] for one in (reading.model, model)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("target", READ)
@given(data=st.data())
@settings(parent=DRAWS, max_examples=60)
def test_whatever_a_target_has_no_words_for_is_named(
    target: str, data: st.DataObject, tmp_path: Path
) -> None:
    plan = data.draw(any_plans(target))
    export = export_plan(plan, to=target)
    reading = read_again(export, plan, tmp_path)
    if reading.layout is None or reading.model is None:
        # The job that is left is none, which its software would refuse: the plan is not expressible.
        assert export.inexpressible, reading.problems
        return
    assert unnamed(export, differing(plan, reading)) == set()


@pytest.mark.parametrize("chunks", [1, 2])
def test_operators_of_some_layers_are_mindformers(chunks: int, tmp_path: Path) -> None:
    base = found(ENGINES["mindformers"], LLAMA, 60.0).best
    assert base is not None
    stages = {} if chunks == 1 else {"virtual_pipeline_parallel": 2, "schedule": "interleaved"}
    fields = {
        **LAYOUT.model_dump(),
        **stages,
        "layers_per_stage": (4 // chunks,) * 2 * chunks,
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "expert_halves": False,
        "recompute": "selective",
        "recompute_modules": ("norm",),
        "recompute_method": "block",
        "recompute_num_layers": 1,
    }
    plan = base.model_copy(update={"model": LLAMA, "layout": Layout.model_validate(fields)})
    reading = read_again(export_plan(plan, to="mindformers"), plan, tmp_path)
    assert reading.layout is not None, reading.problems
    assert (reading.layout.recompute_method, reading.layout.recompute_num_layers) == ("block", 1)


@given(layers=st.lists(st.integers(1, 6), min_size=2, max_size=8), chunks=st.integers(1, 3))
def test_layers_of_torchtitan_are_shared_out_as_it_does(layers: list[int], chunks: int) -> None:
    listed = tuple(layers)
    found = less_layers(listed, chunks)
    if found is not None:
        each, first, last = found
        assert stage_layers(sum(listed), len(listed), first, last) == listed
        assert chunks <= 2 if each is None else -(-(sum(listed) + first + last) // each) == len(listed)
    if max(listed) == min(listed):
        assert found == (listed[0], 0, 0)


@pytest.mark.parametrize("schedule", [None, "1f1b", "zbv", "interleaved"])
@pytest.mark.parametrize(("model", "devices"), [("llama2-13b", 6), ("llama2-13b", 24), ("gpt3-2.7b", 40)])
def test_torchtitan_has_options_for_the_stages_that_are_found(
    model: str, devices: int, schedule: str | None
) -> None:
    """30 or 40 layers that few pipelines divide: what is found is what its options share out."""
    pin = {} if schedule is None else {"schedule": schedule}
    result = search(
        model,
        world_size=devices,
        engine="torchtitan",
        device="h100",
        max_global_batch_size=120,
        pin=pin,
    )
    plans = result.plans(20)
    assert plans
    for plan in plans:
        read = less_layers(plan.layout.layers_per_stage, plan.layout.virtual_pipeline_parallel)
        assert plan.layout.pipeline_parallel == 1 or read is not None, plan.layout


def test_a_switch_before_a_subcommand_is_read(tmp_path: Path) -> None:
    """In `--training.enable_cpu_offload activation-checkpoint:full` the second word is no value."""
    result = found("torchtitan", LLAMA, 60.0)
    assert result.best is not None
    layout = result.best.layout.model_copy(update={"offload_optimizer": True, "recompute": "full"})
    plan = result.best.model_copy(update={"layout": layout})
    assert "offload_optimizer" not in differing(
        plan, read_again(export_plan(plan, to="torchtitan"), plan, tmp_path)
    )


def test_fewer_layers_of_the_last_stage_are_looked_for() -> None:
    """7, 7, 6 and 4 layers, as the head takes as long as layers."""
    result = search(
        "gpt2-medium",
        world_size=2,
        engine="torchtitan",
        device="h100",
        global_batch_size=32,
        pin="schedule=zbv",
    )
    best = result.best
    assert best is not None
    split = best.layout.layers_per_stage
    assert split[-1] < split[1]
    assert split in shared_splits(24, 4, 2)


@pytest.mark.parametrize("name", FEATURES)
def test_each_form_of_a_model_is_said_to_megatron_or_named(name: str, tmp_path: Path) -> None:
    base = found("megatron", LLAMA, 60.0).best
    assert base is not None
    model = ModelSpec.model_validate(LLAMA.model_dump() | FEATURES[name])
    plan = base.model_copy(update={"model": model})
    exported = export_plan(plan, to="megatron")
    assert unnamed(exported, differing(plan, read_again(exported, plan, tmp_path))) == set()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_connection_is_asked_for_but_beside_fsdp(stage: int) -> None:
    """Megatron-LM refuses FSDP with one connection, and with other checkpoints than its own."""
    plan = found("megatron", LLAMA, 60.0).best
    assert plan is not None
    layout = Layout.model_validate(LAYOUT.model_dump() | {"expert_parallel": 1, "zero_stage": stage})
    layout = layout.model_copy(update={"expert_tensor_parallel": 1})
    for target in ("megatron", "megatron-bridge"):
        exported = export_plan(plan.model_copy(update={"layout": layout}), to=target)
        assert exported.environment == ({} if stage > 1 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        assert target != "megatron" or ("--ckpt-format fsdp_dtensor" in exported.text) == (stage > 1)


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
    assert said != ("mtp" in whole.named)
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
    "muon_mode": {"optimizer": "muon", "muon_mode": "distributed"},
    "expert_halves": {"expert_halves": True, "expert_parallel": 4},
    "cuda_graphs": {"cuda_graphs": True},
}


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_cannot_run_has_an_exit_code_of_its_own(target: str) -> None:
    plan = found(ENGINES[target], EXPERTS, 60.0).best
    assert plan is not None
    refused = 0
    for value in UNUSUAL.values():
        layout = Layout.model_validate(LAYOUT.model_dump() | value)
        export = export_plan(plan.model_copy(update={"layout": layout}), to=target)
        if export.inexpressible:
            refused += 1
            with pytest.raises(Inexpressible, match=f"{target} does not support") as raised:
                check_expressible(export, nearest=False)
            assert raised.value.exit_code == 5
        check_expressible(export, nearest=True)
    assert refused > 1


def test_files_are_of_their_format() -> None:
    for target, engine in ENGINES.items():
        plan = found(engine, LLAMA, 60.0).best
        assert plan is not None
        text = TARGETS[target](plan).text
        if target == "deepspeed":
            assert json.loads(text)["train_batch_size"] == plan.layout.global_batch_size
        elif target not in SUFFIXES:
            assert isinstance(yaml.safe_load(text), dict) and "&id" not in text


@pytest.mark.parametrize(("experts", "dense", "words"), [(0, 0, "mlp"), (8, 0, "moe"), (8, 2, "mlp moe")])
def test_megatron_has_a_word_for_an_mlp_without_experts_and_one_with(
    experts: int, dense: int, words: str
) -> None:
    base = found(ENGINES["megatron"], LLAMA, 60.0).best
    assert base is not None
    fields = {"experts": experts, "top_k": 2, "expert_ffn": 64, "dense_layers": dense} if experts else {}
    model = ModelSpec.model_validate({**LLAMA.model_dump(), **fields})
    layout = base.layout.model_copy(update={"recompute": "selective", "recompute_modules": ("mlp",)})
    export = export_plan(base.model_copy(update={"model": model, "layout": layout}), to="megatron")
    assert f"--recompute-modules {words}" in export.text.replace("\\\n", "").replace("'", "")
