"""Plans as the JSON configuration of DeepSpeed (deepspeed/runtime/config.py and zero/config.py)."""

from __future__ import annotations

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.writing.export import (
    Export,
    Values,
    flag_values,
    json_text,
    lacks,
    lacks_bundled_features,
    lacks_fp8,
    lacks_recomputation,
)

IN_CODE = {
    "pipeline_parallel": "stages are made in code, by deepspeed.pipe.PipelineModule",
    "virtual_pipeline_parallel": "a rank has one chunk",
    "schedule": "its pipelines are 1f1b",
    "layers_per_stage": "stages are made in code, by deepspeed.pipe.PipelineModule",
    "context_parallel_form": "its ranks of a sequence exchange heads (deepspeed.sequence)",
    "expert_parallel": "experts are spread in code, by deepspeed.moe.layer.MoE(ep_size=...)",
    "expert_tensor_parallel": "experts are split in code",
}
"""Reasons why a degree has no key in DeepSpeed's file: it is set in code, or DeepSpeed lacks it."""

USUAL = {"schedule": ("1f1b",), "context_parallel_form": ("all_gather", "all_to_all")}
"""Values that need no key; for degrees this is 1."""


def export_deepspeed(model: ModelSpec, layout: Layout) -> Export:
    """The configuration file; the training script keeps the model, learning rates and the optimizer."""
    missing: list[str] = []
    values = layout_values(layout, missing)
    in_script = (f"model {model.name}: the training script makes it",)
    return Export("deepspeed", json_text(values), tuple(missing), flag_values(values), in_script=in_script)


def layout_values(layout: Layout, missing: list[str]) -> Values:
    """The keys of a layout; degrees without a key are added to `missing`."""
    for name, why in IN_CODE.items():
        usual = USUAL.get(name, (1,)) if name != "layers_per_stage" else (layout.layers_per_stage[:1],)
        if getattr(layout, name) not in usual:
            lacks(missing, layout, name, why)
    if layout.context_parallel > 1 and layout.context_parallel_form == "all_gather":
        lacks(missing, layout, "context_parallel_form", IN_CODE["context_parallel_form"])
    values: Values = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization.stage": layout.zero_stage,
        **_zero(layout, missing),
    }
    if layout.context_parallel > 1:
        values["sequence_parallel_size"] = layout.context_parallel
    if layout.tensor_parallel > 1:
        values["tensor_parallel.autotp_size"] = layout.tensor_parallel
    if layout.sequence_parallel:
        lacks(missing, layout, "sequence_parallel", "its tensor parallelism has none")
    if layout.precision in ("bf16", "fp16"):
        values[f"{layout.precision}.enabled"] = True
    elif layout.precision != "fp32":
        lacks(missing, layout, "precision", "products in other formats are made in code")
    lacks_fp8(missing, layout, "as precision")
    lacks_bundled_features(missing, layout)
    values["data_types.grad_accum_dtype"] = "fp32"
    values["communication_data_type"] = layout.gradient_reduction
    if layout.recompute != "none":
        lacks_recomputation(missing, layout, "layers are wrapped in code, by checkpointing")
    if layout.offload_activations:
        lacks(missing, layout, "offload_activations", "activations are sent to the host in code")
    if layout.optimizer != "adam":
        lacks(missing, layout, "optimizer", "it is made in code")
    return values


def _zero(layout: Layout, missing: list[str]) -> Values:
    values: Values = {}
    at = "zero_optimization"
    if layout.offload_optimizer and layout.zero_stage:
        values |= {f"{at}.offload_optimizer.device": "cpu", f"{at}.offload_optimizer.pin_memory": True}
    elif layout.offload_optimizer:
        lacks(missing, layout, "offload_optimizer", "it offloads only states that ZeRO splits")
    if layout.zero_replicas > 1 and layout.zero_stage == 3:
        values[f"{at}.mics_shard_size"] = layout.zero_shards
    elif layout.zero_replicas > 1:
        lacks(missing, layout, "zero_replicas", "it keeps copies at stage 3 only (MiCS)")
    return values
