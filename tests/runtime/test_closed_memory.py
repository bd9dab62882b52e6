"""Closed forms of memory beside dry runs, for kinds whose compiled layers keep something of their own."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from costmodels import Layout, ModelSpec
from costmodels.catalogue import load_device, load_engine
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model_parts import Lora
from planner.inputs.model import resolve_model
from runtime.dryrun.run import trace

OFF = 0.02
"""The largest relative error of closed forms against the dry run."""


def llama(**fields: Any) -> ModelSpec:
    """A few layers of a large model, so that what layers keep decides."""
    return resolve_model("llama3-8b").model_copy(update={"layers": 6, "seq": 4096, "vocab": 32000} | fields)


def errors(spec: ModelSpec, rank: int = 0, /, **fields: Any) -> float:
    """The closed form of the tensors of a pipeline rank less its dry run, as a share of the latter."""
    layout = Layout.model_validate(
        {"layers_per_stage": (spec.layers,), "micro_batch_size": 4, "global_batch_size": 4} | fields
    )
    compiled = layout.schedule not in SPLIT_BACKWARD
    traced = trace(spec, layout, pipeline_rank=rank, compiled=compiled).peak.total
    found = planner.evaluate(layout, model=spec, device="h100").memory[rank]
    # A dry run does not see the workspaces of libraries.
    workspace = load_engine("bundled").for_device(load_device("h100")).allocator.workspace_bytes
    beside = found.reserve + found.context + found.communicators + found.doubt + workspace
    return (found.total - beside) / traced - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp8", "tensor_parallel": 2},
        {"precision": "fp8", "tensor_parallel": 2, "sequence_parallel": True},
        {"precision": "fp8", "fp8_recipe": "rowwise", "tensor_parallel": 2},
        {"precision": "fp8", "recompute": "selective"},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_compiled_layers_keep_what_is_counted(fields: dict[str, Any]) -> None:
    pytest.importorskip("torchao")
    assert abs(errors(llama(), **fields)) < OFF


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.parametrize(
    "modules", [("norm",), ("mlp",), ("mlp", "norm"), ("core_attention", "norm")], ids="+".join
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"tensor_parallel": 4, "sequence_parallel": True}],
    ids=["one rank", "sequence parallel"],
)
def test_recomputed_norms_and_mlps_keep_no_output_of_a_norm(
    modules: tuple[str, ...], fields: dict[str, Any]
) -> None:
    """Compilers keep a tensor that one recomputed function hands to another. So a norm is one with what uses
    it: the MLP, or the gathering of sequence parallelism."""
    spec = llama(layers=8)
    assert abs(errors(spec, recompute="selective", recompute_modules=modules, **fields)) < OFF


@pytest.mark.slow
def test_experts_that_compilers_leave_out_drop_their_activations() -> None:
    """Experts on other ranks get rows that no compiler knows; what is recomputed is dropped all the same."""
    spec = resolve_model("mixtral-8x7b").model_copy(update={"layers": 3})
    spread = {"expert_parallel": 8, "data_parallel": 8, "zero_stage": 1, "micro_batch_size": 1}
    again = {"recompute": "selective", "recompute_modules": ("activation", "norm")}
    assert abs(errors(spec, global_batch_size=16, **spread, **again)) < OFF


@pytest.mark.slow
@pytest.mark.parametrize("again", [22, 24])
def test_layers_that_recompute_nothing_go_first(again: int) -> None:
    """The last layers keep their activations, which have gone when the first ones recompute."""
    block = {"recompute": "full", "recompute_method": "block", "recompute_num_layers": again}
    few = {"data_parallel": 64, "zero_stage": 3, "global_batch_size": 256}
    assert abs(errors(llama(layers=24), **block, **few)) < OFF


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-12b", "gpt-oss-20b"])
def test_layers_that_are_not_compiled_keep_what_is_counted(name: str) -> None:
    """Norms with weights from one keep inputs in fp32; clamped halves of experts are tensors of their own."""
    spec = resolve_model(name).model_copy(update={"layers": 12, "seq": 2048, "vocab": 32000})
    split = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "layers_per_stage": (3, 3, 3, 3)}
    assert abs(errors(spec, **split, schedule="dualpipev", global_batch_size=32)) < OFF


@pytest.mark.slow
@pytest.mark.parametrize("is_parallel", [True, False])
def test_norms_of_one_input_keep_it_once(is_parallel: bool) -> None:
    fields = {"layers": 6, "vocab": 32000, "parallel_residual": is_parallel}
    assert abs(errors(resolve_model("gpt-neox-20b").model_copy(update=fields))) < OFF


@pytest.mark.slow
def test_layers_with_adapters_keep_what_is_counted() -> None:
    adapted = llama(lora=Lora(rank=16, alpha=32.0))
    assert abs(errors(adapted, recompute="full")) < OFF


@pytest.mark.slow
def test_gradients_of_weights_lie_beside_their_sums_where_backward_is_split() -> None:
    """A stage makes all of them in one pass and then adds them up, the fullest moment with few tokens."""
    split = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "layers_per_stage": (2, 2, 2, 2)}
    few = {"schedule": "interleaved_zb", "micro_batch_size": 1, "global_batch_size": 16}
    assert abs(errors(llama(layers=8, seq=512), **split, **few)) < OFF


@pytest.mark.slow
def test_recomputed_layers_have_whole_outputs_without_sequence_parallelism() -> None:
    stages = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "layers_per_stage": (2, 2, 2, 2)}
    split = {"tensor_parallel": 8, "schedule": "interleaved", "recompute": "full", "global_batch_size": 64}
    assert abs(errors(llama(layers=8), **stages, **split)) < OFF


@pytest.mark.slow
def test_stages_with_more_layers_have_the_most_microbatches_in_flight() -> None:
    """Stages of the first chunks have twice the layers, and stay for more microbatches."""
    split = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 4, "schedule": "interleaved"}
    stages = {"layers_per_stage": (2, 2, 2, 2, 1, 1, 1, 1), "micro_batch_size": 8, "global_batch_size": 128}
    assert abs(errors(llama(layers=12), **split, **stages)) < OFF


@pytest.mark.slow
def test_layers_reduce_gradients_beside_layers_that_recompute_nothing() -> None:
    """Wide layers on few tokens: the gradients of one are larger than what the next one keeps."""
    spec = llama(layers=12, hidden=8192, heads=64, kv_heads=64, ffn=28672, seq=2048)
    block = {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 6}
    few = {"data_parallel": 16, "zero_stage": 3, "micro_batch_size": 1, "global_batch_size": 16}
    assert abs(errors(spec, **block, **few)) < OFF


@pytest.mark.slow
@pytest.mark.parametrize(("module", "stages", "batch"), [("norm", 3, 2), ("mlp", 1, 4)])
def test_experts_that_are_not_compiled_keep_what_is_counted(module: str, stages: int, batch: int) -> None:
    """A compiled norm hands its output to the experts, which keep it; all of the experts are recomputed with
    their router and the copies of tokens."""
    spec = resolve_model("deepseek-v2-lite").model_copy(update={"layers": 6, "vocab": 32000})
    spread = {"data_parallel": 8, "zero_stage": 1, "micro_batch_size": batch, "global_batch_size": 64}
    split = {"pipeline_parallel": stages, "layers_per_stage": (6 // stages,) * stages}
    again = {"recompute": "selective", "recompute_modules": (module,)}
    assert abs(errors(spec, **spread, **split, **again)) < OFF


@pytest.mark.slow
def test_the_last_stage_adds_up_weight_gradients_beside_new_ones_where_backward_is_split() -> None:
    """In a step of one turn no backward pass follows that could add them up before."""
    spec = llama(layers=8, hidden=8192, heads=64, kv_heads=64, ffn=32768, seq=2048)
    split = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 4, "layers_per_stage": (1,) * 8}
    few = {"micro_batch_size": 2, "global_batch_size": 16, "data_parallel": 4, "zero_stage": 1}
    assert abs(errors(spec, 1, schedule="interleaved_zb", **split, **few)) < OFF


@pytest.mark.slow
def test_stages_are_gathered_beside_all_activations() -> None:
    """Eight experts on 16 ranks are split within their matrices, so that a gathered layer is there twice."""
    spec = resolve_model("mixtral-8x7b").model_copy(update={"layers": 8, "vocab": 4096})
    split = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 4, "layers_per_stage": (1,) * 8}
    spread = {"data_parallel": 16, "zero_stage": 1, "micro_batch_size": 1, "global_batch_size": 128}
    assert abs(errors(spec, schedule="interleaved", **split, **spread)) < OFF
