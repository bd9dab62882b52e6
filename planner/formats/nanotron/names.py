"""Names of degrees of a layout in nanotron (src/nanotron/config, commit 2411b022 of April 2026)."""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

KEYS = key_table("nanotron").fields
"""Keys of nanotron's YAML by their field of `Layout` or `ModelSpec` (keys/nanotron.yaml)."""

REQUIRED = tuple(
    KEYS[name]
    for name in (
        "data_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "micro_batch_size",
        "micro_batches",
        "seq",
    )
)
"""Keys that have no default (config/config.py, `TokensArgs`, and config/parallelism_config.py)."""

TRAINING = key_table("nanotron").flags
"""Keys of training by the equivalent flag of Megatron-LM."""

TP_MODES = {"REDUCE_SCATTER": True, "ALL_REDUCE": False}
"""Values of `parallelism.tp_mode`: True for sequence parallelism."""

FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats by `model.dtype`."""

OPTIMIZERS = {"adamW": "adam", "sgd": "sgd"}
"""Optimizers by `optimizer.optimizer_factory.name`."""
