"""Names of the parts of a job in NeMo-RL: keys below `policy` in its YAML (examples/configs)."""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

POLICY = "policy"
MEGATRON, DTENSOR = f"{POLICY}.megatron_cfg", f"{POLICY}.dtensor_cfg"

FLAGS = {
    "train_micro_batch_size": "--micro-batch-size",
    "train_global_batch_size": "--global-batch-size",
    "max_total_sequence_length": "--seq-length",
}
"""Flags of Megatron-LM by keys of `policy`."""

MEGATRON_FLAGS = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "fp8": "--fp8-format",
    "fp8_param": "--fp8-param-gather",
    "use_custom_fsdp": "--use-custom-fsdp",
}
"""Flags by the last word of a key of `policy.megatron_cfg`, if it is not the flag's name."""

OFF = {"grad_reduce_in_fp32": "--grad-reduce-in-bf16", "apply_rope_fusion": "--no-rope-fusion"}
"""Switches that are given where a key is false."""

PARTS = ("optimizer", "scheduler", "distributed_data_parallel_config", "fp8_cfg")
"""Sections of `policy.megatron_cfg` whose keys are flags too."""

RECOMPUTATION = ("recompute_granularity", "recompute_modules")
"""Keys that count where `activation_checkpointing` is true."""

KEYS = key_table("nemo-rl").fields
"""Keys of jobs under DTensor by their field of `Layout` or `ModelSpec` (keys/nemo-rl.yaml)."""

FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats by `policy.precision`."""

LORA = {
    "dim": "--lora_r",
    "alpha": "--lora_alpha",
    "target_modules": "--lora_target_modules",
    "match_all_linear": "--lora_target_linear",
}
"""Flags of trainers by keys of `policy.dtensor_cfg.lora_cfg`."""
