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
from planner.inputs.hf_config import model_from_hf_config
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
# Of the waves of 8 elements at base 500 (6, 30, 141 and 659 positions) some are kept and some are stretched.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}

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
