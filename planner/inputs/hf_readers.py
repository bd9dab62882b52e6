"""From the keys of a Hugging Face `config.json` to the fields of `ModelSpec`, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]

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

SCALING_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)
"""Keys of `rope_scaling` that `RopeScaling` has under the same name."""

STRETCHED_FROM = ("llama3", "yarn", "longrope")
"""Types of `rope_scaling` that calculate with the length of pre-training."""


def _whole(config: Config, key: str, default: int | None = None) -> int:
    """A count that a reader calculates with; `default` stands for a key that is missing or null."""
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, str) and value.strip().isdigit():
        raise ValueError(f"{key} is the text {value!r}, not a number; write {value.strip()} without quotes")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def _activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _one_of(config: Config, key: str, values: tuple[str, ...]) -> str:
    """The value of a key that selects a method; the first of `values` where it is missing or null."""
    value = config.get(key)
    if value is None:
        return values[0]
    if value not in values:
        raise ValueError(f"{key} {value!r} is not supported: only {' and '.join(values)}")
    return str(value)


def _given(config: Config, key: str, default: Any) -> Any:
    """The value of a key; `default` where it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def _rope_scaling(config: Config) -> Config | None:
    """How rotary frequencies are stretched; None when they are not."""
    # Transformers 5 calls the mapping rope_parameters, and names an absent scaling "default".
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling is {scaling!r}, not a mapping")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None and config.get("rope_scaling"):
        raise ValueError(f"rope_scaling {scaling!r} names no rope_type")
    if kind in (None, "default"):
        return None
    fields = {name: scaling[name] for name in SCALING_KEYS if scaling.get(name) is not None}
    # As Transformers reads it: outside the mapping it counts first, and without it nothing was stretched.
    key = "original_max_position_embeddings"
    original = config.get(key) or scaling.get(key)
    if not original and kind in STRETCHED_FROM:
        original = config["max_position_embeddings"]
    if "factor" not in fields and kind == "yarn":
        fields["factor"] = _whole(config, "max_position_embeddings") / max(1, _whole({key: original}, key))
    if "factor" not in fields and kind in ("linear", "llama3"):
        raise ValueError(f"rope_scaling {scaling!r} names no factor")
    return fields | {"kind": str(kind), "original_positions": original or 0}


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
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(key, usual) != usual:
            raise ValueError(f"{key} {config[key]!r} is not supported: only {str(usual).lower()} is")
    return {
        "layers": _whole(config, "n_layer"),
        "hidden": _whole(config, "n_embd"),
        "heads": _whole(config, "n_head"),
        "ffn": _whole(config, "n_inner", 4 * _whole(config, "n_embd")),
        "vocab": _whole(config, "vocab_size"),
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
        "layers": _whole(config, "num_hidden_layers"),
        "hidden": _whole(config, "hidden_size"),
        "ffn": _whole(config, "intermediate_size"),
        "heads": _whole(config, "num_attention_heads"),
        "kv_heads": _whole(config, "num_key_value_heads", 0) or _whole(config, "num_attention_heads"),
        "vocab": _whole(config, "vocab_size"),
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
        fields["head_dim"] = _whole(config, "head_dim")
    return fields


def _mistral(config: Config) -> Config:
    # A missing key means Transformers' default.
    return _llama(config) | {"sliding_window": _sliding_window(config, default=4096)}


def _mixtral(config: Config) -> Config:
    return _llama(config) | {
        "sliding_window": _sliding_window(config),
        "experts": _whole(config, "num_local_experts"),
        "top_k": _whole(config, "num_experts_per_tok"),
        "expert_ffn": _whole(config, "intermediate_size"),
        "router": {"score": "softmax", "normalised": True},
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
        # Transformers 5 writes the number of a Qwen 3 under the other name.
        "experts": _given(config, "num_local_experts", None) or config["num_experts"],
        "top_k": _whole(config, "num_experts_per_tok"),
        "expert_ffn": _whole(config, "moe_intermediate_size"),
        "dense_layers": len(dense),
        "router": {"score": "softmax", "normalised": _given(config, "norm_topk_prob", False)},
    }


def _qwen2_moe(config: Config) -> Config:
    shared = _whole(config, "shared_expert_intermediate_size")
    fields = {"shared_expert_ffn": shared, "shared_expert_gate": shared > 0}
    qkv_bias = _given(config, "qkv_bias", True)
    return _qwen2(config) | _qwen_experts(config) | fields | {"qkv_bias": qkv_bias}


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
        "kv_heads": _whole(config, "num_attention_heads"),
        "head_dim": nope + rope,
        "experts": _whole(config, "n_routed_experts"),
        "top_k": _whole(config, "num_experts_per_tok"),
        "expert_ffn": width,
        "shared_expert_ffn": _whole(config, "n_shared_experts", 0) * width,
        "dense_layers": config.get("first_k_dense_replace", 0),
        "latent_attention": {
            "q_lora_rank": config.get("q_lora_rank") or 0,
            "kv_lora_rank": _whole(config, "kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": _whole(config, "v_head_dim"),
        },
    }


def _deepseek_v2(config: Config) -> Config:
    _one_of(config, "scoring_func", ("softmax",))
    if config.get("norm_topk_prob"):
        # DeepSeek's own model then leaves out routed_scaling_factor, Transformers ignores the key.
        raise ValueError(
            f"norm_topk_prob {config['norm_topk_prob']!r} of a deepseek_v2 is not supported: implementations "
            "of the model disagree about it, give false"
        )
    router = {
        "score": "softmax",
        "normalised": False,
        "scale": _given(config, "routed_scaling_factor", 1.0),
    }
    if _one_of(config, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy":
        router |= {"groups": config["n_group"], "top_groups": config["topk_group"], "group_score": "max"}
    return _deepseek(config) | {"router": router}


def _deepseek_v3(config: Config) -> Config:
    _one_of(config, "scoring_func", ("sigmoid",))
    _one_of(config, "topk_method", ("noaux_tc",))
    router = {
        "score": "sigmoid",
        "normalised": _given(config, "norm_topk_prob", True),
        "scale": _given(config, "routed_scaling_factor", 2.5),
        "groups": _given(config, "n_group", 8),
        "top_groups": _given(config, "topk_group", 4),
        "group_score": "top2",
        "expert_bias": True,
    }
    return _deepseek(config) | {"router": router}


READERS: dict[str, Callable[[Config], Config]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""Reader by `model_type`: from the keys of a config.json to the fields of `ModelSpec`."""
