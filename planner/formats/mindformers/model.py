"""The model of a configuration of MindFormers for the static graph (mindformers/models, `*Config`)."""

from __future__ import annotations

from typing import Any

from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError, on_one_line
from costmodels.spec.model import ModelSpec
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.layout_fields import Places
from planner.formats.facts.reading import Problems
from planner.formats.mindformers.names import STATIC_KEYS

AT = "model.model_config"

_LEARNED = {"GPT2Config", "PanguAlphaConfig", "BloomConfig"}
_GATED = {
    *("LlamaConfig", "DeepseekV3Config", "DeepseekV2Config", "MixtralConfig", "QwenConfig", "Qwen2Config"),
    *("Qwen3Config", "InternLMConfig", "InternLM2Config", "BaichuanConfig", "YiConfig", "MistralConfig", ""),
    *("TelechatConfig", "DeepSeekConfig", "Qwen2MoeConfig"),
}
"""Model types with GPT-2's layers, and with Llama's layers, by whether the MLP is gated."""

_GLM = {"ChatGLM2Config", "ChatGLM3Config", "ChatGLM4Config"}
"""Model types with GLM's layers: gated, with rotary embedding on half of each head."""

_MODEL_TYPES = {
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3Config",
    "qwen2": "Qwen2Config",
    "llama": "LlamaConfig",
}
_MODEL_TYPES |= {"deepseek_v3": "DeepseekV3Config", "deepseekv3": "DeepseekV3Config", "gpt2": "GPT2Config"}
"""`model_type` of the configurations that have Hugging Face's keys."""


def read_model(keys: Keyed, problems: Problems, assumed: list[str]) -> ModelSpec | None:
    """The model in `model.model_config`; None, and a problem, where it describes none."""
    kind = keys.text(f"{AT}.type") or keys.text(f"{AT}.model_type") or ""
    kind = _MODEL_TYPES.get(kind, kind)
    before = len(problems.found)
    sizes = {
        "layers": keys.count(f"{AT}.num_layers", f"{AT}.num_hidden_layers"),
        "hidden": keys.count(f"{AT}.hidden_size"),
        "heads": keys.count(f"{AT}.num_heads", f"{AT}.num_attention_heads"),
        "seq": keys.count(f"{AT}.seq_length"),
        "vocab": keys.count(f"{AT}.vocab_size", f"{AT}.padded_vocab_size"),
    }
    if kind not in _LEARNED | _GATED | _GLM:
        keys.add(
            "unknown", f"models of type {kind} are not known", f"{AT}.type", "give a config.json beside it"
        )
        return None
    defaults = {"vocab": 50257 if kind in _LEARNED else 32000, "seq": 1024 if kind == "GPT2Config" else 2048}
    missing = [STATIC_KEYS[name] for name in ("layers", "hidden", "heads") if not sizes[name]]
    if missing or len(problems.found) > before:
        if missing and len(problems.found) == before:
            text = f"no {', '.join(missing)}: the model is not known"
            problems.add("unknown", text, missing[0], None, "give its config.json beside it")
        return None
    for name, value in defaults.items():
        if not sizes[name]:
            sizes[name] = value
            assumed.append(f"{STATIC_KEYS[name]}: {value} (the default of {kind or 'Llama'})")
    made = _gpt2(keys) if kind in _LEARNED else _glm(keys) if kind in _GLM else _llama(keys, sizes)
    fields: dict[str, Any] = dict(sizes) | made
    fields |= {"name": (keys.text(STATIC_KEYS["name"]) or kind or "model").strip() or "model"}
    positions = keys.count(f"{AT}.max_position_embedding", f"{AT}.max_position_embeddings")
    fields["max_positions"] = max(positions or 0, int(fields["seq"] or 0))
    fields |= _experts(keys)
    try:
        return build(ModelSpec, fields, f"{AT} of {keys.file}")
    except InputError as error:
        message = on_one_line(error)
        places = Places(STATIC_KEYS, {path: entry.line for path, entry in keys.entries.items()})
        problems.add("illegal", message, *places.blamed(message))
        return None


def _gpt2(keys: Keyed) -> dict[str, Any]:
    hidden = keys.count(f"{AT}.hidden_size") or 0
    return {
        "ffn": keys.count(f"{AT}.intermediate_size") or (keys.count(f"{AT}.expand_ratio") or 4) * hidden,
        "activation": "gelu_tanh",
        "norm": "layernorm",
        "position": "learned",
        "tied": True,
        "linear_bias": True,
    }


def _glm(keys: Keyed) -> dict[str, Any]:
    heads, width = keys.count(f"{AT}.num_attention_heads") or 1, keys.count(f"{AT}.kv_channels")
    grouped = keys.switch(f"{AT}.multi_query_attention")
    fields: dict[str, Any] = {
        "ffn": keys.count(f"{AT}.ffn_hidden_size") or 4 * (keys.count(f"{AT}.hidden_size") or 1),
        "kv_heads": (keys.count(f"{AT}.multi_query_group_num") if grouped else None) or heads,
        "gated": True,
        "activation": "silu",
        "norm": "rmsnorm" if keys.switch(f"{AT}.rmsnorm", default=True) else "layernorm",
        "norm_eps": keys.number(f"{AT}.layernorm_epsilon") or 1e-5,
        "position": "rope",
        "tied": False,
        "linear_bias": keys.switch(f"{AT}.add_bias_linear"),
        "qkv_bias": keys.switch(f"{AT}.add_qkv_bias"),
    }
    return fields | ({"head_dim": width, "rotary_dim": width // 2} if width else {})


def _llama(keys: Keyed, sizes: dict[str, int | None]) -> dict[str, Any]:
    hidden = sizes["hidden"] or 0
    width = keys.count(f"{AT}.intermediate_size")
    if width is None:
        # Meta's rule: two thirds of 4 x hidden, stretched (by 0.01 more here), up to the next multiple.
        stretch = keys.number(f"{AT}.ffn_dim_multiplier")
        stretched = int(8 * hidden / 3 * (1.0 if stretch is None else stretch + 0.01))
        multiple = keys.count(f"{AT}.multiple_of") or 256
        width = -(-stretched // multiple) * multiple
    fields: dict[str, Any] = {
        "ffn": width,
        "kv_heads": keys.count(f"{AT}.n_kv_heads", f"{AT}.num_key_value_heads") or sizes["heads"],
        "gated": True,
        "activation": "silu",
        "norm": "rmsnorm",
        "norm_eps": keys.number(f"{AT}.rms_norm_eps") or 1e-5,
        "position": "rope",
        "rope_theta": keys.number(f"{AT}.theta", f"{AT}.rope_theta") or 10000.0,
        "tied": keys.switch(f"{AT}.tie_word_embeddings"),
        "linear_bias": False,
        "qkv_bias": keys.switch(f"{AT}.qkv_has_bias"),
        "qk_norm": keys.switch(f"{AT}.qk_layernorm"),
    }
    head = keys.count(f"{AT}.head_dim", f"{AT}.kv_channels")
    return fields | ({"head_dim": head} if head else {}) | _latent(keys)


def _latent(keys: Keyed) -> dict[str, Any]:
    """Fields of the multi-head latent attention of DeepSeek's models."""
    rank = keys.count(f"{AT}.kv_lora_rank")
    if rank is None:
        return {}
    nope = keys.count(f"{AT}.qk_nope_head_dim") or 128
    rope = keys.count(f"{AT}.qk_rope_head_dim") or 64
    latent = {
        "q_lora_rank": keys.count(f"{AT}.q_lora_rank", least=0) or 0,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.count(f"{AT}.v_head_dim") or 128,
    }
    return {"latent_attention": latent, "head_dim": nope + rope}


def _experts(keys: Keyed) -> dict[str, Any]:
    """Fields of experts, from `moe_config` or from the model's own keys."""
    experts = keys.count("moe_config.expert_num", f"{AT}.n_routed_experts", f"{AT}.num_experts") or 1
    if experts == 1:
        return {}
    width = keys.count("moe_config.moe_intermediate_size", f"{AT}.moe_intermediate_size")
    width = width or keys.count(f"{AT}.intermediate_size") or 4 * (keys.count(f"{AT}.hidden_size") or 1)
    shared = keys.count("moe_config.shared_expert_num", f"{AT}.n_shared_experts", least=0) or 0
    dense = keys.text("moe_config.first_k_dense_replace") or ""
    return {
        "experts": experts,
        "top_k": keys.count("moe_config.num_experts_chosen", f"{AT}.num_experts_per_tok") or 1,
        "expert_ffn": width,
        "shared_expert_ffn": shared * width,
        "dense_layers": int(dense) if dense.isdigit() and len(dense) < 5 else 0,
    }
