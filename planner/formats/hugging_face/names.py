"""Names of degrees of a layout in Hugging Face's trainer, accelerate and DeepSpeed."""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

MICRO = "--per_device_train_batch_size"
STEPS = "--gradient_accumulation_steps"

FLAGS = key_table("transformers").fields
"""Flags of transformers by their field of `Layout` (keys/transformers.yaml)."""

DEEPSPEED_KEYS = key_table("deepspeed").fields
"""Keys of DeepSpeed's JSON by their field of `Layout` (keys/deepspeed.yaml)."""

ACCELERATE_KEYS = key_table("accelerate").fields
"""Keys of accelerate's YAML by their field of `Layout` (keys/accelerate.yaml)."""

SHARDING = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
}
"""FSDP's strategies as ZeRO stages, numbered from 1 in this order; hybrid strategies keep a copy on each
node."""
