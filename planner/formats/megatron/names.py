"""Names of degrees of a layout in Megatron-LM and MindSpeed."""

from __future__ import annotations

DEGREE_FLAGS = {
    "tensor_parallel": "--tensor-model-parallel-size",
    "pipeline_parallel": "--pipeline-model-parallel-size",
    "virtual_pipeline_parallel": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel": "--context-parallel-size",
    "context_parallel_form": "--cp-comm-type",
    "expert_parallel": "--expert-model-parallel-size",
    "expert_tensor_parallel": "--expert-tensor-parallel-size",
    "sequence_parallel": "--sequence-parallel",
    "micro_batch_size": "--micro-batch-size",
    "global_batch_size": "--global-batch-size",
    "zero_stage": "--use-distributed-optimizer",
    "zero_replicas": "--num-distributed-optimizer-instances",
    "recompute_modules": "--recompute-modules",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
    "recompute": "--recompute-granularity",
    "layers_per_stage": "--pipeline-model-parallel-layout",
    "schedule": "--num-virtual-stages-per-pipeline-rank",
    "offload_activations": "--swap-attention",
    "offload_optimizer": "--optimizer-cpu-offload",
    "precision": "--bf16",
    "optimizer": "--optimizer",
    "gradient_reduction": "--grad-reduce-in-bf16",
    "heads": "--num-attention-heads",
    "kv_heads": "--num-query-groups",
    "experts": "--num-experts",
    "seq": "--seq-length",
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn": "--ffn-hidden-size",
}
"""Flags by their field of `Layout` or `ModelSpec`."""

CONTEXT_ALGORITHMS = {
    "ulysses_cp_algo": "all_to_all",
    "megatron_cp_algo": "ring",
    "kvallgather_cp_algo": "all_gather",
}
"""Values of MindSpeed's `--context-parallel-algo` (mindspeed/features_manager/context_parallel)."""

COMMUNICATION_TYPES = {
    "p2p": "ring",
    "a2a": "all_to_all",
    "all_gather": "all_gather",
    "allgather": "all_gather",
}
"""Values of Megatron-LM's `--cp-comm-type`."""

MODULES = {"core_attn": "core_attention", "layernorm": "norm", "mlp": "mlp", "moe_act": "activation"}
"""Values of Megatron-LM's `--recompute-modules`."""

UNPRICED_MODULES = ("mla_up_proj", "shared_experts", "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc")
"""Further modules that Megatron-LM recomputes; estimates treat them as kept."""

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Values of Megatron-FSDP's `--data-parallel-sharding-strategy`, as ZeRO stages."""

OPTIMIZERS = {"adam": "adam", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
"""Values of Megatron-LM's `--optimizer`."""
