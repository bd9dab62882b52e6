"""Names of degrees of a layout in Hugging Face Accelerate (release 1.15, accelerate/commands/launch.py)."""

from __future__ import annotations

KEYS = {
    "world_size": "num_processes",
    "precision": "mixed_precision",
    "zero_stage": "fsdp_config.fsdp_reshard_after_forward",
    "offload_optimizer": "fsdp_config.fsdp_offload_params",
    "recompute": "fsdp_config.fsdp_activation_checkpointing",
    "zero_replicas": "parallelism_config.parallelism_config_dp_replicate_size",
    "data_parallel": "parallelism_config.parallelism_config_dp_shard_size",
    "tensor_parallel": "parallelism_config.parallelism_config_tp_size",
    "context_parallel": "parallelism_config.parallelism_config_cp_size",
    "context_parallel_form": "parallelism_config.parallelism_config_cp_comm_strategy",
    "micro_batches": "deepspeed_config.gradient_accumulation_steps",
}
"""Keys of accelerate's YAML by their field of `Layout`; the training script sets batches."""

KIND = "distributed_type"
DEEPSPEED_ZERO = "deepspeed_config.zero_stage"
DEEPSPEED_OFFLOAD = "deepspeed_config.offload_optimizer_device"

FORMATS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
"""Number formats by their names in `mixed_precision`."""

STRATEGIES = {"allgather": "all_gather", "alltoall": "ring"}
"""Forms of context parallelism by `cp_comm_strategy`, the rotate method of torch's context parallelism."""
