"""What degrees of a layout are called by Hugging Face's trainer, accelerate and DeepSpeed."""

from __future__ import annotations

MICRO = "--per_device_train_batch_size"
STEPS = "--gradient_accumulation_steps"

FLAGS = {
    "micro_batch_size": MICRO,
    "micro_batches": STEPS,
    "recompute": "--gradient_checkpointing",
    "precision": "--bf16",
    "optimizer": "--optim",
    "zero_stage": "--fsdp",
}
"""Flags of transformers' TrainingArguments by the field of `Layout` that they give."""

DEEPSPEED_KEYS = {
    "zero_stage": "zero_optimization.stage",
    "zero_replicas": "zero_optimization.mics_shard_size",
    "tensor_parallel": "tensor_parallel.autotp_size",
    "context_parallel": "sequence_parallel_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batches": "gradient_accumulation_steps",
    "global_batch_size": "train_batch_size",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "precision": "bf16.enabled",
}
"""Keys of DeepSpeed's JSON (deepspeed/runtime/config.py and zero/config.py)."""

ACCELERATE_KEYS = {
    "zero_stage": "fsdp_config.fsdp_sharding_strategy",
    "offload_optimizer": "fsdp_config.fsdp_offload_params",
    "recompute": "fsdp_config.fsdp_activation_checkpointing",
    "precision": "mixed_precision",
    "tensor_parallel": "parallelism_config.parallelism_config_tp_size",
    "context_parallel": "parallelism_config.parallelism_config_cp_size",
    "context_parallel_form": "parallelism_config.parallelism_config_cp_comm_strategy",
    "data_parallel": "num_processes",
    "zero_replicas": "parallelism_config.parallelism_config_dp_replicate_size",
}
"""Keys of accelerate's YAML (accelerate/commands/launch.py and parallelism_config.py)."""

SHARDING = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
}
"""FSDP's strategies as stages of ZeRO, numbered from 1 in this order; those that are hybrid keep a copy on
each node."""

OPTIMIZERS = {"adafactor": "adafactor", "sgd": "sgd", "adamw_8bit": "adam8bit", "adamw_bnb_8bit": "adam8bit"}
"""`--optim`; others are taken for Adam."""
