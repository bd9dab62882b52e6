"""Tiny models of Hugging Face transformers, and their tensors under the names of ours.

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
from planner.hf_config import model_from_hf_config

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


def hugging_face(name: str, folder: Path) -> tuple[torch.nn.Module, ModelSpec]:
    """A model of `MODELS` with weights large enough to show, and what the planner reads of its config."""
    import transformers

    model_type, keys = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **keys)
    config.save_pretrained(folder)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
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


def as_ours(spec: ModelSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or their gradients, of a Hugging Face model under the names and in the shapes of ours.

    Every tensor must have its place: one that is left over fails.
    """
    left = dict(tensors)
    ours = _gpt2(spec, left) if spec.position == "learned" else _llama(spec, left)
    assert not left, f"no place for {sorted(left)}"
    return ours


GPT2_LINEAR = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def _gpt2(spec: ModelSpec, left: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {
        "embedding.tokens.weight": left.pop("transformer.wte.weight"),
        "embedding.positions.weight": left.pop("transformer.wpe.weight"),
    }
    for layer in range(spec.layers):
        theirs, own = f"transformer.h.{layer}.", f"layers.{layer}."
        for kind in ("weight", "bias"):
            linear = {name: left.pop(f"{theirs}{place}.{kind}") for name, place in GPT2_LINEAR.items()}
            parts = left.pop(f"{theirs}attn.c_attn.{kind}").chunk(3, dim=-1)
            linear |= {
                f"attention.{name}": part for name, part in zip(("query", "key", "value"), parts, strict=True)
            }
            for name, tensor in linear.items():
                # Weights of a Conv1D are transposed.
                ours[f"{own}{name}.{kind}"] = tensor.T if kind == "weight" else tensor
            ours[f"{own}attention_norm.{kind}"] = left.pop(f"{theirs}ln_1.{kind}")
            ours[f"{own}mlp_norm.{kind}"] = left.pop(f"{theirs}ln_2.{kind}")
    return ours | {f"norm.{kind}": left.pop(f"transformer.ln_f.{kind}") for kind in ("weight", "bias")}


def _llama(spec: ModelSpec, left: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {
        "embedding.tokens.weight": left.pop("model.embed_tokens.weight"),
        "norm.weight": left.pop("model.norm.weight"),
    }
    if not spec.tied:
        ours["head.weight"] = left.pop("lm_head.weight")
    for layer in range(spec.layers):
        theirs = f"model.layers.{layer}."
        own = {
            "attention_norm.weight": left.pop(f"{theirs}input_layernorm.weight"),
            "mlp_norm.weight": left.pop(f"{theirs}post_attention_layernorm.weight"),
        }
        attention = _taken(left, f"{theirs}self_attn.")
        own |= _attention(attention) if spec.latent_attention is None else _latent(spec, attention)
        # Transformers 4 had another name for the experts of a Mixtral.
        mlp = _taken(left, f"{theirs}mlp.") or _taken(left, f"{theirs}block_sparse_moe.")
        own |= _experts(spec, mlp) if spec.experts and layer >= spec.dense_layers else _mlp(mlp, "mlp.")
        left |= {f"{theirs}(rest).{name}": tensor for name, tensor in (attention | mlp).items()}
        ours |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return ours


def _taken(left: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Removes what begins with `prefix` from `left`, and returns it under the rest of its names."""
    return {name.removeprefix(prefix): left.pop(name) for name in list(left) if name.startswith(prefix)}


def _attention(left: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    names |= {"q_norm": "query_norm", "k_norm": "key_norm"}
    own = {}
    for name in list(left):
        part, kind = name.split(".")
        own[f"attention.{names[part]}.{kind}"] = left.pop(name)
    return own


def _latent(spec: ModelSpec, left: dict[str, Tensor]) -> dict[str, Tensor]:
    sizes = spec.latent_attention
    assert sizes is not None
    nope, rope = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
    # Theirs turns neighbours by one angle, ours an element of the first half and one of the second.
    halves = torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2)))
    per_head = torch.cat((torch.arange(nope), nope + halves))
    queries = left.pop("q_b_proj.weight" if sizes.q_lora_rank else "q_proj.weight")
    latents = left.pop("kv_a_proj_with_mqa.weight")
    own = {
        "query.weight": queries.unflatten(0, (spec.heads, nope + rope))[:, per_head].flatten(0, 1),
        "compress.latent.weight": torch.cat((latents[:-rope], latents[-rope:][halves])),
        "compress.latent_norm.weight": left.pop("kv_a_layernorm.weight"),
        "key_value.weight": left.pop("kv_b_proj.weight"),
        "output.weight": left.pop("o_proj.weight"),
    }
    if sizes.q_lora_rank:
        own["compress.query.weight"] = left.pop("q_a_proj.weight")
        own["compress.query_norm.weight"] = left.pop("q_a_layernorm.weight")
    return {f"attention.{name}": tensor for name, tensor in own.items()}


def _mlp(left: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    return {f"{place}{name}.weight": left.pop(f"{name}_proj.weight") for name in ("up", "gate", "down")}


def _experts(spec: ModelSpec, left: dict[str, Tensor]) -> dict[str, Tensor]:
    own = {"router.weight": left.pop("gate.weight")}
    if spec.router.expert_bias:
        own["router.expert_bias"] = left.pop("gate.e_score_correction_bias")
    if "experts.gate_up_proj" in left:
        gate, up = left.pop("experts.gate_up_proj").chunk(2, dim=1)
        down = left.pop("experts.down_proj")
    else:  # Transformers 4: one network for each expert.
        names = ("w1", "w3", "w2") if "experts.0.w1.weight" in left else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([left.pop(f"experts.{expert}.{name}.weight") for expert in range(spec.experts)])
            for name in names
        )
    own |= {"experts.gate": gate, "experts.up": up, "experts.down": down}
    if spec.shared_expert_ffn:
        own |= _mlp(_taken(left, "shared_expert.") or _taken(left, "shared_experts."), "shared.")
    if spec.shared_expert_gate:
        own["shared_gate.weight"] = left.pop("shared_expert_gate.weight")
    return {f"mlp.{name}": tensor for name, tensor in own.items()}
