"""The config.json of a model that was trained here: which Hugging Face architecture it is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from costmodels import ModelSpec, RopeScaling
from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError
from planner.inputs.hf_readers import ACTIVATIONS, READERS, SCALING_KEYS, Config

FREE_FIELDS = ("name", "source", "published_parameters", "seq")
"""Fields of a model that no weight and no logit depends on."""

_SCALING_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": tuple(key for key in SCALING_KEYS if not key.endswith("freq_factor")),
}
"""Fields of `RopeScaling` that each kind has."""


def differences(one: ModelSpec, other: ModelSpec) -> list[str]:
    """Names of the fields in which two models differ so that weights of one are not weights of the other.

    How many tokens a sample has, how far rotary positions reach and how many tokens experts take in do not
    count, nor does the width of dense layers where there are none.
    """
    names = set(ModelSpec.model_fields) - set(FREE_FIELDS)
    if one.position == other.position != "learned":
        names.discard("max_positions")
    if one.moe_layers == other.moe_layers == one.layers == other.layers:
        names.discard("ffn")
    if not (one.moe_layers or other.moe_layers):
        names -= {"router", "top_k", "expert_ffn", "dense_layers"}
    dropless = [
        spec.model_copy(update={"router": spec.router.model_copy(update={"capacity_factor": 0.0})})
        for spec in (one, other)
    ]
    return [
        name
        for name in ModelSpec.model_fields
        if name in names and len({repr(getattr(spec, name)) for spec in dropless}) > 1
    ]


def config_for(spec: ModelSpec) -> Config:
    """The keys of a config.json of `spec`, with the first architecture that is the same model.

    Raises `InputError` where there is none, and says what the nearest one has differently.
    """
    nearest: list[str] | None = None
    for model_type, write in _WRITERS.items():
        config = {"model_type": model_type, "architectures": [_CLASSES[model_type]]} | write(spec)
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
    """In what the model that is read from `config` differs from `spec`."""
    try:
        fields = READERS[config["model_type"]](config)
        fields.pop("sliding_window", None)
        fields |= {"name": spec.name, "seq": fields["max_positions"]}
        return differences(spec, build(ModelSpec, fields, "config.json"))
    except (InputError, ValueError, TypeError, KeyError):
        return list(ModelSpec.model_fields)


_FIRST_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Hugging Face name of an activation by ours; of several the first."""


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "vocab_size": spec.vocab,
        "n_positions": spec.max_positions,
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "activation_function": _FIRST_NAMES[spec.activation],
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
        "hidden_act": _FIRST_NAMES[spec.activation],
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


def _qwen2(spec: ModelSpec) -> Config:
    config = _llama(spec) | {"use_sliding_window": False}
    # The architecture has no key for it.
    return {key: value for key, value in config.items() if key != "head_dim"}


def _qwen3(spec: ModelSpec) -> Config:
    return _llama(spec) | {"use_sliding_window": False, "attention_bias": False}


def _mixtral(spec: ModelSpec) -> Config:
    return _llama(spec) | {
        "intermediate_size": spec.expert_ffn,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "sliding_window": None,
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


def _deepseek(spec: ModelSpec) -> Config:
    sizes, router = spec.latent_attention, spec.router
    if sizes is None or not spec.expert_ffn:
        return {}
    config = _llama(spec) | {
        "q_lora_rank": sizes.q_lora_rank or None,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "n_routed_experts": spec.experts,
        "n_shared_experts": spec.shared_expert_ffn // spec.expert_ffn or None,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.expert_ffn,
        "moe_layer_freq": 1,
        "first_k_dense_replace": spec.dense_layers,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.normalised,
        "num_nextn_predict_layers": 0,
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
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""By model type; a model may be several, of which the first counts."""

_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Transformers' class of each model type."""
