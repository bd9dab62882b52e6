"""Plans as the JSON configuration of DeepSpeed (deepspeed/runtime/config.py and zero/config.py)."""

from __future__ import annotations

import json
from typing import Any

from costmodels.spec.layout import Layout
from planner.formats.export import Export

IN_CODE = {
    "pipeline_parallel": "stages are made in code, by deepspeed.pipe.PipelineModule",
    "context_parallel": "ranks of a sequence are made in code, by deepspeed.sequence",
    "expert_parallel": "experts are spread in code, by deepspeed.moe.layer.MoE(ep_size=...)",
    "expert_tensor_parallel": "experts are split in code",
}
"""Degrees that DeepSpeed has and its file has not."""


def export_deepspeed(layout: Layout) -> Export:
    """The configuration file; learning rates and the optimizer stay with the training script."""
    missing = [
        f"{name}={getattr(layout, name)}: {why}" for name, why in IN_CODE.items() if getattr(layout, name) > 1
    ]
    values: dict[str, Any] = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": _zero(layout, missing),
    }
    if layout.tensor_parallel > 1:
        values["tensor_parallel"] = {"autotp_size": layout.tensor_parallel}
    if layout.sequence_parallel:
        missing.append("sequence_parallel=true: its tensor parallelism has none")
    if layout.precision in ("bf16", "fp16"):
        values[layout.precision] = {"enabled": True}
    elif layout.precision == "fp8":
        missing.append("precision=fp8: products in fp8 are made in code")
    values["data_types"] = {"grad_accum_dtype": "fp32"}
    values["communication_data_type"] = layout.gradient_reduction
    if layout.recompute != "none":
        missing.append(
            f"recompute={layout.describe_recompute()}: layers are wrapped in code, by checkpointing"
        )
    if layout.offload_activations:
        missing.append("offload_activations=true: activations are sent to the host in code")
    if layout.optimizer != "adam":
        missing.append(f"optimizer={layout.optimizer}: it is made in code")
    return Export("deepspeed", json.dumps(values, indent=2) + "\n", tuple(missing), {})


def _zero(layout: Layout, missing: list[str]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.zero_replicas > 1 and layout.zero_stage == 3:
        zero["mics_shard_size"] = layout.zero_shards
    elif layout.zero_replicas > 1:
        missing.append(f"zero_replicas={layout.zero_replicas}: it copies what stage 3 splits alone (MiCS)")
    return zero
