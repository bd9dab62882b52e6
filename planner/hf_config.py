"""Models from Hugging Face `config.json` files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError
from costmodels.model_spec import ModelSpec

LONGEST_DEFAULT_SEQ = 4096
"""Tokens of a training sample when the user does not say: models of rotary positions are pre-trained
at about this length, however long a sequence they accept afterwards."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}
"""`ModelSpec.activation` by Hugging Face name."""

Config = dict[str, Any]


def model_from_hf_config(path: str | Path, seq: int | None = None) -> ModelSpec:
    """The model that a Hugging Face config.json describes.

    `path` is the file or its folder. `seq`, in tokens, is by default `n_positions` of a GPT-2 and the
    lesser of `max_position_embeddings` and 4096 of the others; a longer one extends the positions.
    `InputError` for a missing or broken file, a model type that is not supported, a missing key, an
    option that `ModelSpec` cannot express, or attention within a window that is shorter than `seq`.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    config = _read(file)
    origin = f"model config {str(file)!r}"
    model_type = config.get("model_type")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise InputError(f"{origin}: model_type {model_type!r} is not one of {', '.join(READERS)}")
    try:
        fields = reader(config)
    except KeyError as missing:
        raise InputError(f"{origin}: a {model_type} needs the key {missing.args[0]!r}") from None
    except ValueError as unsupported:
        raise InputError(f"{origin}: {unsupported}") from None
    positions = fields["max_positions"]
    if seq is None:
        seq = positions if fields["position"] == "learned" else min(positions, LONGEST_DEFAULT_SEQ)
    window = fields.pop("sliding_window", None)
    if window is not None and window < seq:
        raise InputError(
            f"{origin}: sliding_window {window} is shorter than the sequence of {seq}, and attention within "
            f"a window is not modelled; give --seq-length up to {window}"
        )
    fields |= {"seq": seq, "max_positions": max(seq, positions)}
    fields |= {"name": _name(file), "source": f"{file.name} of Hugging Face type {model_type}"}
    return build(ModelSpec, fields, origin)


def _read(file: Path) -> Config:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"model config {str(file)!r} is not valid JSON at line {error.lineno}, column {error.colno}: "
            f"{error.msg}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read model config {str(file)!r}: {reason}") from None
    if not isinstance(config, dict):
        raise InputError(f"model config {str(file)!r} must hold one JSON object of keys and values")
    return config


def _name(file: Path) -> str:
    folder = file.resolve().parent.name
    return folder if file.name == "config.json" and folder else file.stem


def _whole(config: Config, key: str, default: int | None = None) -> int:
    """A count that a reader calculates with; `default` stands for a key that is missing or null."""
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def _activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rope_scaling(config: Config) -> str:
    """The type under which rotary frequencies are stretched; empty when they are not."""
    # Transformers 5 calls the mapping rope_parameters, and names an absent scaling "default".
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling is {scaling!r}, not a mapping")
    name = scaling.get("rope_type", scaling.get("type"))
    if name is None and config.get("rope_scaling"):
        raise ValueError(f"rope_scaling {scaling!r} names no rope_type")
    return "" if name in (None, "default") else str(name)


def _sliding_window(config: Config, default: int | None = None) -> int | None:
    """Tokens that attention looks back; None for all of them."""
    window = config.get("sliding_window", default)
    return None if window is None else _whole(config | {"sliding_window": window}, "sliding_window")


def _late_sliding_window(config: Config) -> int | None:
    """The window of Qwen models, whose layers from `max_window_layers` on use it."""
    first = _whole(config, "max_window_layers", 28)
    if not config.get("use_sliding_window") or first >= _whole(config, "num_hidden_layers"):
        return None
    return _sliding_window(config, default=4096)


def _gpt2(config: Config) -> Config:
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn": _whole(config, "n_inner", 4 * _whole(config, "n_embd")),
        "vocab": config["vocab_size"],
        "max_positions": _whole(config, "n_positions"),
        "activation": _activation(config.get("activation_function", "gelu_new")),
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "position": "learned",
        "tied": config.get("tie_word_embeddings", True),
        "linear_bias": True,
    }


def _llama(config: Config) -> Config:
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{key} {config[key]!r} is not supported: only false is")
    # Transformers 5 moved the base of the rotary positions into a mapping.
    rope = config.get("rope_parameters")
    base = config.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, dict) else None)
    fields = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "max_positions": _whole(config, "max_position_embeddings"),
        "gated": True,
        "activation": _activation(config.get("hidden_act", "silu")),
        "norm": "rmsnorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "position": "rope",
        "rope_theta": base or 10000.0,
        "rope_scaling": _rope_scaling(config),
        "tied": config.get("tie_word_embeddings", False),
        "linear_bias": False,
    }
    if config.get("head_dim"):
        fields["head_dim"] = config["head_dim"]
    return fields


def _mistral(config: Config) -> Config:
    # A missing key means Transformers' default.
    return _llama(config) | {"sliding_window": _sliding_window(config, default=4096)}


def _mixtral(config: Config) -> Config:
    return _llama(config) | {
        "sliding_window": _sliding_window(config),
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_ffn": config["intermediate_size"],
    }


def _qwen2(config: Config) -> Config:
    return _llama(config) | {"qkv_bias": True, "sliding_window": _late_sliding_window(config)}


def _qwen_experts(config: Config) -> Config:
    if config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"decoder_sparse_step {config['decoder_sparse_step']} is not supported: experts must be in every "
            "layer after the leading dense ones (1)"
        )
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers {dense} is not supported: dense layers must come first")
    return {
        "experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_ffn": config["moe_intermediate_size"],
        "dense_layers": len(dense),
    }


def _qwen2_moe(config: Config) -> Config:
    shared = config["shared_expert_intermediate_size"]
    return _qwen2(config) | _qwen_experts(config) | {"shared_expert_ffn": shared}


def _qwen3(config: Config) -> Config:
    return _llama(config) | {
        "qk_norm": True,
        "head_dim": config.get("head_dim") or 128,
        "sliding_window": _late_sliding_window(config),
    }


def _qwen3_moe(config: Config) -> Config:
    return _qwen3(config) | _qwen_experts(config)


def _deepseek(config: Config) -> Config:
    if config.get("moe_layer_freq", 1) != 1:
        raise ValueError(
            f"moe_layer_freq {config['moe_layer_freq']} is not supported: experts must be in every layer "
            "after the leading dense ones (1)"
        )
    width = _whole(config, "moe_intermediate_size")
    nope, rope = _whole(config, "qk_nope_head_dim"), _whole(config, "qk_rope_head_dim")
    return _llama(config) | {
        "kv_heads": config["num_attention_heads"],
        "head_dim": nope + rope,
        "experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_ffn": width,
        "shared_expert_ffn": _whole(config, "n_shared_experts", 0) * width,
        "dense_layers": config.get("first_k_dense_replace", 0),
        "latent_attention": {
            "q_lora_rank": config.get("q_lora_rank") or 0,
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": config["v_head_dim"],
        },
    }


READERS: dict[str, Callable[[Config], Config]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""Reader by `model_type`: from the keys of a config.json to the fields of `ModelSpec`."""
