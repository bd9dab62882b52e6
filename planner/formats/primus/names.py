"""Names of Megatron-LM's flags in Primus, and the default values of its modules."""

from __future__ import annotations

from collections.abc import Mapping

from planner.formats.facts.key_table import key_table

_TABLE = key_table("primus")

FLAGS = {key: flag for key, flag in _TABLE.flag_of.items() if key not in _TABLE.opposite}
"""Flags by keys with another name; usual keys are the names under which Megatron-LM's parser stores flags."""

OFF = {key: flag for key, flag in _TABLE.flag_of.items() if key in _TABLE.opposite}
"""Switches that are given where a key is false, and that are not named `--no-KEY`."""

_TRAINER = {"bf16": "true", "use_distributed_optimizer": "true", "sequence_parallel": "true"}
"""Values that modules/megatron and models/megatron/language_model.yaml set for all models."""

MODULES: Mapping[str, Mapping[str, str]] = {
    "pre_trainer.yaml": {
        **_TRAINER,
        "micro_batch_size": "2",
        "global_batch_size": "16",
        "seq_length": "1024",
    },
    "sft_trainer.yaml": {
        **_TRAINER,
        "micro_batch_size": "1",
        "global_batch_size": "128",
        "seq_length": "2048",
    },
}
"""Keys that the modules of Megatron-LM set (primus/configs/modules/megatron), by the file of the module."""

TITAN_MODULE = {"activation_checkpoint.mode": "none"}
"""Values in primus/configs/modules/torchtitan/pre_trainer.yaml that differ from torchtitan's defaults."""

EIGHT_RANKS = (
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "glm-5"),
    *("llama4-scout", "llama4-maverick", "minimax-m2"),
)
"""Models whose preset has 8 expert-parallel ranks (primus/configs/models/megatron)."""

OF_EXPERTS, OF_LATENT = (
    "moe_",
    ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
"""Keys that are in the presets of all models, but only apply with experts, or with latent attention."""

SAME_MODEL = {
    "--seq-length",
    "--max-position-embeddings",
    "--norm-epsilon",
    "--rotary-interleaved",
    "--tokenizer-type",
    "--tokenizer-model",
    "--vocab-size",
}
"""Flags of a model that do not change the sizes of its preset."""
