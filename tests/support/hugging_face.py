"""Tiny models of Hugging Face transformers, and their tensors under our names.

Versions from 4.48 on will do for most: `skip_unless_there` skips what the installed one lacks or gets wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from costmodels import ModelSpec
from planner.inputs.huggingface.config_file import model_from_hf_config
from runtime.huggingface.model_folder import HuggingFaceModel

SEQ = 24
BATCH = 2
VOCAB = 96

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 500.0,
}  # fmt: skip
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "kv_lora_rank": 12,
    "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
}  # fmt: skip
# Some waves of 8 elements at base 500 (6, 30, 141 and 659 positions) are kept and some are stretched.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3, "head_dim": 16,
}  # fmt: skip
GEMMA3_POSITIONS = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}),
    "llama": ("llama", SIZES | {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral": (
        "mistral",
        SIZES | {"sliding_window": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", SIZES | {"rope_scaling": YARN}),
    "qwen2_moe": ("qwen2_moe", SIZES | QWEN_EXPERTS | {"shared_expert_intermediate_size": 28}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        SIZES | QWEN_EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        SIZES | LATENT | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        SIZES
        | LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}
        | {"norm_topk_prob": False, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        SIZES
        | LATENT
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "phi3": ("phi3", SIZES | {"partial_rotary_factor": 0.5, "sliding_window": None, "pad_token_id": 0}),
    "glm": ("glm", SIZES | {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "glm4": ("glm4", SIZES | {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "seed_oss": ("seed_oss", SIZES | {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}),
    "llama_biases": ("llama", SIZES | {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", SIZES | {"head_dim": 16, "use_bias": True}),
    "olmo2": ("olmo2", SIZES),
    "starcoder2": ("starcoder2", SIZES | {"use_bias": True, "sliding_window": None, "eos_token_id": 1}),
    "gemma": ("gemma", SIZES | {"head_dim": 16}),
    "glm4_moe": (
        "glm4_moe",
        SIZES
        | {key: LATENT[key] for key in ("first_k_dense_replace", "n_routed_experts", "n_shared_experts")}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16, "use_qk_norm": True}
        | {"n_group": 2, "topk_group": 1, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "mistral_window": ("mistral", SIZES | {"sliding_window": 7}),
    "qwen2_window": (
        "qwen2",
        SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "olmo3": ("olmo3", SIZES | {"sliding_window": 7, "num_hidden_layers": 4, "rope_scaling": YARN}),
    "exaone4": (
        "exaone4",
        SIZES | {"sliding_window": 7, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    ),
    "smollm3": ("smollm3", SIZES | {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "gemma3": (
        "gemma3_text",
        {key: value for key, value in SIZES.items() if key != "rope_theta"}
        | {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 3, "query_pre_attn_scalar": 20}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": GEMMA3_POSITIONS},
    ),
    "qwen3_next": (
        "qwen3_next",
        SIZES | QWEN_EXPERTS | DELTA | {"shared_expert_intermediate_size": 28, "norm_topk_prob": True},
    ),
    "qwen3_5": ("qwen3_5_text", SIZES | DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        SIZES | QWEN_EXPERTS | DELTA | {"shared_expert_intermediate_size": 28},
    ),
    "gpt_oss": (
        "gpt_oss",
        {key: value for key, value in SIZES.items() if key != "rope_theta"}
        | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7}
        | {"rope_parameters": YARN | {"rope_theta": 500.0, "truncate": False}},
    ),
    "gemma2": (
        "gemma2",
        SIZES
        | {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
    ),
    "granite": (
        "granite",
        SIZES
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
        | {"logits_scaling": 5.0},
    ),
    "llama4": (
        "llama4_text",
        {key: value for key, value in SIZES.items() if key != "rope_theta"}
        | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 40}
        | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 7}
        | {"no_rope_layer_interval": 4, "floor_scale": 5, "attn_scale": 0.3, "pad_token_id": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "arcee": ("arcee", SIZES | {"head_dim": 16}),
    "granitemoe": (
        "granitemoe",
        SIZES
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 5.0},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        SIZES
        | {"num_hidden_layers": 3, "moe_layer_start_index": 1, "moe_num_experts": 6, "moe_k": 2}
        | {"moe_intermediate_size": 20, "moe_num_shared_experts": 2, "eos_token_id": 1},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        SIZES
        | {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 1.8, "pad_token_id": 0},
    ),
    "minimax_m2": (
        "minimax_m2",
        SIZES | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}
"""Model type and configuration by name."""

LEAST_VERSIONS = {"qwen2": "4.55", "deepseek_v2": "5.15"}
"""Earlier ones take another length of pre-training for YaRN, and leave out DeepSeek-V2's factor of scores."""


def skip_unless_there(name: str) -> None:
    """Skip the test where the installed transformers cannot be the reference for a model of `MODELS`."""
    transformers = pytest.importorskip("transformers")
    if MODELS[name][0] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {MODELS[name][0]}")
    least = LEAST_VERSIONS.get(name, "4.48")
    if Version(transformers.__version__) < Version(least):
        pytest.skip(f"transformers {transformers.__version__} is older than {least}")


def hugging_face(name: str, folder: Path) -> tuple[Any, ModelSpec]:
    """A model of `MODELS` with weights large enough to show, and what the planner reads of its config."""
    import transformers

    model_type, keys = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **keys)
    config.save_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in tensors_of(model).items():
            noise = torch.randn(tensor.shape, generator=generator)
            vector = tensor.dim() == 1
            tensor.copy_((1.0 if vector and not key.endswith("bias") else 0.0) + 0.3 * noise)
    return model.eval(), model_from_hf_config(folder, seq=SEQ)


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name, tied ones once, and the biases of routers."""
    buffers = {key: value for key, value in model.named_buffers() if key.endswith("score_correction_bias")}
    return dict(model.named_parameters()) | buffers


def saved(model: Any, folder: Path) -> HuggingFaceModel:
    """The files of a model as transformers writes them, under our names."""
    model.save_pretrained(folder)
    return HuggingFaceModel(folder, SEQ)


def as_ours(model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face model under the names and in the shapes of ours, by way of its files."""
    files = saved(model, folder)
    return {name: files.read_ours(name) for name in files.shapes}


def gradients_as_ours(model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
    """The gradients of a Hugging Face model likewise; its weights are lost."""
    with torch.no_grad():
        for value in tensors_of(model).values():
            value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
    return as_ours(model, folder)
