"""The config.json of a model that was trained here, with its Hugging Face architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from costmodels import ModelSpec, RopeScaling
from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError
from planner.inputs.huggingface.keys import ACTIVATIONS, ATTENTION_KINDS, SCALING_KEYS, Config
from planner.inputs.huggingface.readers import model_fields

FREE_FIELDS = ("name", "source", "published_parameters", "seq", "mtp_layers", "lora", "mtp")
"""Fields of a model that do not affect its own weights and logits, including adapters and MTP modules."""

_SCALING_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": tuple(key for key in SCALING_KEYS if not key.endswith("freq_factor")),
}
"""Fields of `RopeScaling` that each kind has."""


def differences(one: ModelSpec, other: ModelSpec) -> list[str]:
    """Names of the fields whose difference makes the weights of two models incompatible.

    The tokens of a sample, the range of rotary positions and the capacity of experts do not count. Neither
    does the width of dense layers where there are none.
    """
    names = set(ModelSpec.model_fields) - set(FREE_FIELDS)
    if one.position == other.position != "learned":
        names.discard("max_positions")
    if one.moe_layers == other.moe_layers == one.layers == other.layers:
        names.discard("ffn")
    if not (one.moe_layers or other.moe_layers):
        names -= {"router", "top_k", "expert_ffn", "dense_layers"}
    dropless = [
        spec.model_copy(
            update={
                "router": spec.router.model_copy(update={"capacity_factor": 0.0, "loads": ()}),
                "score_scale": spec.score_scale or spec.head_dim**-0.5,
            }
        )
        for spec in (one, other)
    ]
    return [
        name
        for name in ModelSpec.model_fields
        if name in names and len({repr(getattr(spec, name)) for spec in dropless}) > 1
    ]


def config_for(spec: ModelSpec) -> Config:
    """The keys of a config.json for `spec`, with the first architecture that is the same model.

    Raises `InputError` where there is none, with the differences of the nearest one.
    """
    nearest: list[str] | None = None
    for model_type, write in _WRITERS.items():
        config = {"model_type": model_type, "architectures": [CLASSES[model_type]]} | write(spec)
        found = _differences_from(spec, config)
        if not found:
            return config
        if nearest is None or len(found) < len(nearest):
            nearest = found
    raise InputError(
        f"model {spec.name} is none of the Hugging Face architectures {', '.join(_WRITERS)}: the nearest "
        f"one differs in {', '.join(nearest or ())}"
    )


def with_dtype(config: Config, dtype: torch.dtype) -> Config:
    """`config` with another number format of the weights, under its own key (transformers 5: dtype)."""
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
    return config | dict.fromkeys(keys, name)


def _differences_from(spec: ModelSpec, config: Config) -> list[str]:
    """Fields in which the model of `config` differs from `spec`."""
    try:
        fields = model_fields(config)
        fields |= {"name": spec.name, "seq": fields["max_positions"]}
        return differences(spec, build(ModelSpec, fields, "config.json"))
    except (InputError, ValueError, TypeError, KeyError):
        return list(ModelSpec.model_fields)


_FIRST_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Hugging Face name of an activation function by this package's name; the first of several."""


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "vocab_size": spec.vocab,
        "n_positions": spec.max_positions,
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "activation_function": _FIRST_NAMES.get(spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
    }


def _llama(spec: ModelSpec) -> Config:
    config = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": _FIRST_NAMES.get(spec.activation),
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied,
    }
    return config | ({"rope_scaling": _scaling(spec.rope_scaling)} if spec.rope_scaling else {})


def _scaling(scaling: RopeScaling) -> Config:
    names = _SCALING_FIELDS.get(scaling.kind, ())
    # Zero stands for what is not given.
    fields = {name: value for name in names if (value := getattr(scaling, name)) or name == "truncate"}
    original = scaling.original_positions
    if original:
        fields["original_max_position_embeddings"] = original
    return {"rope_type": scaling.kind} | fields


_LAYER_TYPES = {ours: theirs for theirs, ours in reversed(ATTENTION_KINDS.items())}
"""The name in `layer_types` of a kind of attention; of several names the first."""


def _layer_types(spec: ModelSpec) -> Config:
    kinds = (spec.layer_kind(layer).attention for layer in range(spec.layers))
    return {"layer_types": [_LAYER_TYPES.get(kind, kind) for kind in kinds]}


def _window(spec: ModelSpec) -> Config:
    return {"sliding_window": spec.window if "window" in spec.attention_pattern else None}


def _mistral(spec: ModelSpec) -> Config:
    return _llama(spec) | _window(spec)


def _late_windows(spec: ModelSpec) -> Config:
    """Keys for windows of Qwen models, where only the last layers may have windows."""
    full = sum(spec.layer_kind(layer).attention == "full" for layer in range(spec.layers))
    return {"use_sliding_window": full < spec.layers, "max_window_layers": full, **_window(spec)}


def _qwen2(spec: ModelSpec) -> Config:
    config = _llama(spec) | _late_windows(spec)
    # The architecture has no key for it.
    return {key: value for key, value in config.items() if key != "head_dim"}


def _qwen3(spec: ModelSpec) -> Config:
    return _llama(spec) | _late_windows(spec) | {"attention_bias": spec.qkv_bias}


def _partial(spec: ModelSpec) -> Config:
    part = (spec.rotary_dim or spec.head_dim) / spec.head_dim
    return {"partial_rotary_factor": part}


def _phi3(spec: ModelSpec) -> Config:
    config = _llama(spec) | _partial(spec) | _window(spec)
    # The architecture has no key for it.
    return {key: value for key, value in config.items() if key != "head_dim"}


def _glm4(spec: ModelSpec) -> Config:
    return _llama(spec) | _partial(spec) | {"attention_bias": spec.qkv_bias}


def _seed_oss(spec: ModelSpec) -> Config:
    biases = {"attention_bias": spec.qkv_bias, "attention_out_bias": spec.output_bias}
    return _llama(spec) | biases | {"mlp_bias": False}


def _olmo2(spec: ModelSpec) -> Config:
    config = _llama(spec) | {"attention_bias": spec.qkv_bias}
    return {key: value for key, value in config.items() if key != "head_dim"}


def _starcoder2(spec: ModelSpec) -> Config:
    config = _llama(spec) | {"norm_epsilon": spec.norm_eps, "use_bias": spec.linear_bias}
    return {key: value for key, value in config.items() if key != "head_dim"} | _window(spec)


def _gemma(spec: ModelSpec) -> Config:
    config = {key: value for key, value in _llama(spec).items() if key != "hidden_act"}
    return config | {"hidden_activation": _FIRST_NAMES.get(spec.activation), "attention_bias": spec.qkv_bias}


def _positions_by_kind(spec: ModelSpec) -> Config:
    """Keys of positions for layers with full attention, and for layers with windows."""
    scaling = _scaling(spec.rope_scaling) if spec.rope_scaling else {"rope_type": "default"}
    positions = {
        "full_attention": scaling | {"rope_theta": spec.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": spec.window_rope_theta},
    }
    return {"rope_parameters": positions}


def _olmo3(spec: ModelSpec) -> Config:
    config = {name: value for name, value in _olmo2(spec).items() if not name.startswith("rope_")}
    return config | _window(spec) | _layer_types(spec) | _positions_by_kind(spec)


def _exaone4(spec: ModelSpec) -> Config:
    return _llama(spec) | _window(spec) | _layer_types(spec)


def _smollm3(spec: ModelSpec) -> Config:
    turned = [int(spec.rotates_full or spec.layer_kind(at).attention != "full") for at in range(spec.layers)]
    return _llama(spec) | {"no_rope_layers": turned, "attention_bias": spec.qkv_bias}


def _gemma2(spec: ModelSpec) -> Config:
    return _gemma(spec) | {
        **_window(spec),
        **_layer_types(spec),
        "query_pre_attn_scalar": round((spec.score_scale or spec.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.logits_softcap or None,
    }


def _gemma3(spec: ModelSpec) -> Config:
    config = {name: value for name, value in _gemma(spec).items() if not name.startswith("rope_")}
    return (
        config
        | _window(spec)
        | _layer_types(spec)
        | _positions_by_kind(spec)
        | {
            "query_pre_attn_scalar": round((spec.score_scale or spec.head_dim**-0.5) ** -2),
        }
    )


def _gpt_oss(spec: ModelSpec) -> Config:
    if not spec.experts:
        return {}
    return {name: value for name, value in _llama(spec).items() if name != "hidden_act"} | {
        **_window(spec),
        **_layer_types(spec),
        "attention_bias": spec.linear_bias,
        "intermediate_size": spec.expert_ffn,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
    }


def _granite(spec: ModelSpec) -> Config:
    config = {key: value for key, value in _llama(spec).items() if key != "head_dim"}
    return config | {
        "attention_bias": spec.qkv_bias,
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "attention_multiplier": spec.score_scale or spec.head_dim**-0.5,
        "logits_scaling": 1.0 / spec.logits_scale,
    }


def _llama4(spec: ModelSpec) -> Config:
    if not spec.experts:
        return {}
    kinds = [spec.layer_kind(layer) for layer in range(spec.layers)]
    growth = spec.score_growth
    return _llama(spec) | {
        **_layer_types(spec),
        "no_rope_layers": [int(kind.attention != "full") for kind in kinds],
        "attention_chunk_size": spec.window or None,
        "attention_bias": spec.qkv_bias,
        "intermediate_size": spec.expert_ffn,
        "intermediate_size_mlp": spec.ffn,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "moe_layers": [layer for layer, kind in enumerate(kinds) if kind.mlp == "experts"],
        "use_qk_norm": spec.qk_norm,
        "attn_temperature_tuning": growth is not None,
        **({"floor_scale": growth.positions, "attn_scale": growth.factor} if growth is not None else {}),
    }


def _mixtral(spec: ModelSpec) -> Config:
    return _llama(spec) | {
        "intermediate_size": spec.expert_ffn,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        **_window(spec),
    }


def _qwen_experts(spec: ModelSpec) -> Config:
    return {
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.expert_ffn,
        "norm_topk_prob": spec.router.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(spec.dense_layers)),
    }


def _qwen2_moe(spec: ModelSpec) -> Config:
    shared = {"shared_expert_intermediate_size": spec.shared_expert_ffn, "qkv_bias": spec.qkv_bias}
    return _qwen2(spec) | _qwen_experts(spec) | shared


def _qwen3_moe(spec: ModelSpec) -> Config:
    return _qwen3(spec) | _qwen_experts(spec)


def _gated_delta(spec: ModelSpec) -> Config:
    sizes = spec.linear_attention
    if sizes is None:
        return {}
    return {name: value for name, value in _llama(spec).items() if name != "rope_theta"} | {
        **_layer_types(spec),
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta, **_partial(spec)},
        "attention_bias": spec.qkv_bias,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.conv_kernel,
    }


def _qwen3_next(spec: ModelSpec) -> Config:
    if not spec.experts:
        return {}
    return (
        _gated_delta(spec) | _qwen_experts(spec) | {"shared_expert_intermediate_size": spec.shared_expert_ffn}
    )


def _minimax_m2(spec: ModelSpec) -> Config:
    if not spec.experts:
        return {}
    return _llama(spec) | {
        "intermediate_size": spec.expert_ffn,
        "rotary_dim": spec.rotary_dim or spec.head_dim,
        **_partial(spec),
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
    }


def _sigmoid_experts(spec: ModelSpec) -> Config:
    router = spec.router
    return {
        "n_routed_experts": spec.experts,
        "n_shared_experts": spec.shared_expert_ffn // max(1, spec.expert_ffn) or None,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.expert_ffn,
        "first_k_dense_replace": spec.dense_layers,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.normalised,
        "num_nextn_predict_layers": spec.mtp_depths,
    }


def _glm4_moe(spec: ModelSpec) -> Config:
    if not spec.experts:
        return {}
    biases = {"attention_bias": spec.qkv_bias, "use_qk_norm": spec.qk_norm}
    return _llama(spec) | _partial(spec) | biases | _sigmoid_experts(spec)


def _deepseek(spec: ModelSpec) -> Config:
    sizes = spec.latent_attention
    if sizes is None or not spec.expert_ffn:
        return {}
    config = _llama(spec) | {
        "q_lora_rank": sizes.q_lora_rank or None,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "moe_layer_freq": 1,
        **_sigmoid_experts(spec),
    }
    # The architectures rotate heads of this size, whatever the whole one is.
    return config | {"head_dim": sizes.qk_rope_head_dim}


def _deepseek_v2(spec: ModelSpec) -> Config:
    method = "group_limited_greedy" if spec.router.groups > 1 else "greedy"
    return _deepseek(spec) | {"topk_method": method, "scoring_func": "softmax"}


def _deepseek_v3(spec: ModelSpec) -> Config:
    return _deepseek(spec) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True}


_WRITERS: dict[str, Callable[[ModelSpec], Config]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "phi3": _phi3,
    "glm4": _glm4,
    "glm": _glm4,
    "seed_oss": _seed_oss,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
    "gemma": _gemma,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "smollm3": _smollm3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _gated_delta,
    "gemma2": _gemma2,
    "granite": _granite,
    "llama4_text": _llama4,
}
"""Writers by model type; if several types suit a model, the first counts."""

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm": "GlmForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Transformers' class of each model type."""
