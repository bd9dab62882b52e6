"""What nanotron calls degrees of a layout (src/nanotron/config, commit 2411b022 of April 2026)."""

from __future__ import annotations

KEYS = {
    "data_parallel": "parallelism.dp",
    "tensor_parallel": "parallelism.tp",
    "sequence_parallel": "parallelism.tp_mode",
    "pipeline_parallel": "parallelism.pp",
    "schedule": "parallelism.pp_engine",
    "context_parallel": "parallelism.context_parallel_size",
    "expert_parallel": "parallelism.expert_parallel_size",
    "recompute": "parallelism.recompute_layer",
    "zero_stage": "optimizer.zero_stage",
    "micro_batch_size": "tokens.micro_batch_size",
    "micro_batches": "tokens.batch_accumulation_per_replica",
    "global_batch_size": "tokens.batch_accumulation_per_replica",
    "seq": "tokens.sequence_length",
    "precision": "model.dtype",
    "gradient_reduction": "optimizer.accumulate_grad_in_fp32",
    "optimizer": "optimizer.optimizer_factory.name",
    "layers": "model.model_config.num_hidden_layers",
    "hidden": "model.model_config.hidden_size",
    "ffn": "model.model_config.intermediate_size",
    "heads": "model.model_config.num_attention_heads",
    "kv_heads": "model.model_config.num_key_value_heads",
    "vocab": "model.model_config.vocab_size",
    "experts": "model.model_config.moe_config.num_experts",
}
"""Keys of its YAML by the field of `Layout` or `ModelSpec` that they give."""

TP_MODES = {"REDUCE_SCATTER": True, "ALL_REDUCE": False}
"""`parallelism.tp_mode`, by whether it is sequence parallelism."""

FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""`model.dtype`."""

OPTIMIZERS = {"adamW": "adam", "sgd": "sgd"}
"""`optimizer.optimizer_factory.name`."""
