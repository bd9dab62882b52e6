"""`config.json` of models whose layers have one MLP: from its keys to the fields of `ModelSpec`."""

from __future__ import annotations

from planner.inputs.huggingface.keys import (
    Config,
    activation,
    attention_pattern,
    every_nth,
    given,
    number,
    refuse_other,
    rope,
    rotary_dim,
    whole,
    windows,
)


def gpt2(config: Config) -> Config:
    """Fields of GPT-2."""
    refuse_other(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return {
        "layers": whole(config, "n_layer"),
        "hidden": whole(config, "n_embd"),
        "heads": whole(config, "n_head"),
        "ffn": whole(config, "n_inner", 4 * whole(config, "n_embd")),
        "vocab": whole(config, "vocab_size"),
        "max_positions": whole(config, "n_positions"),
        "activation": activation(given(config, "activation_function", "gelu_new")),
        "norm": "layernorm",
        "norm_eps": given(config, "layer_norm_epsilon", 1e-5),
        "position": "learned",
        "tied": given(config, "tie_word_embeddings", True),
        "linear_bias": True,
    }


def decoder(config: Config) -> Config:
    """Fields that Llama and all models after it share, without biases."""
    heads = whole(config, "num_attention_heads")
    fields = {
        "layers": whole(config, "num_hidden_layers"),
        "hidden": whole(config, "hidden_size"),
        "ffn": whole(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": whole(config, "num_key_value_heads", 0) or heads,
        "vocab": whole(config, "vocab_size"),
        "max_positions": whole(config, "max_position_embeddings"),
        "gated": True,
        "activation": activation(given(config, "hidden_activation", config.get("hidden_act", "silu"))),
        "norm": "rmsnorm",
        "norm_eps": given(config, "rms_norm_eps", 1e-6),
        "position": "rope",
        "tied": given(config, "tie_word_embeddings", False),
        "linear_bias": False,
    }
    turned = rope(config)
    part = turned.pop("partial")
    head = whole(config, "head_dim", 0) or fields["hidden"] // max(1, heads)
    if config.get("head_dim"):
        fields["head_dim"] = head
    return fields | turned | {"rotary_dim": rotary_dim(part, head)}


def biased(config: Config) -> Config:
    """Biases of Llama's attention: on all four projections, or none."""
    has = bool(config.get("attention_bias"))
    return {"qkv_bias": has, "output_bias": has}


def llama(config: Config) -> Config:
    """Llama 1 to 3."""
    fields = decoder(config)
    if config.get("mlp_bias"):
        if not config.get("attention_bias"):
            raise ValueError("mlp_bias true without attention_bias is not supported")
        return fields | {"linear_bias": True}
    return fields | biased(config)


def arcee(config: Config) -> Config:
    """Arcee's models: Llama with an MLP without a gate."""
    return llama(config) | {"gated": False}


def mistral(config: Config) -> Config:
    """Mistral: all layers attend to a window."""
    return decoder(config) | windows(config, ("window",))


def qwen2(config: Config) -> Config:
    """Qwen 2: biases before attention; windows from `max_window_layers` on, where they are used."""
    return decoder(config) | {"qkv_bias": True} | late_windows(config)


def qwen3(config: Config) -> Config:
    """Qwen 3: norms of queries and keys."""
    return decoder(config) | biased(config) | {"qk_norm": True} | late_windows(config)


def late_windows(config: Config) -> Config:
    """The windows of Qwen models, whose layers from `max_window_layers` on use them."""
    layers, first = whole(config, "num_hidden_layers"), whole(config, "max_window_layers", 28)
    if not config.get("use_sliding_window") or first >= layers:
        return {}
    pattern = tuple("full" if layer < first else "window" for layer in range(layers))
    return windows(config | {"sliding_window": config.get("sliding_window") or 4096}, pattern)


def phi3(config: Config) -> Config:
    """Fields of Phi-3 and Phi-4."""
    return decoder(config) | windows(config, ("window",))


def glm4(config: Config) -> Config:
    """GLM-4: norms around attention and MLP, rotary positions on half of each head."""
    return decoder(config) | {"qkv_bias": bool(config.get("attention_bias")), "norm_place": "around"}


def glm(config: Config) -> Config:
    """GLM: as GLM-4 without the norms after attention and MLP."""
    return decoder(config) | {"qkv_bias": bool(config.get("attention_bias"))}


def seed_oss(config: Config) -> Config:
    """Fields of Seed-OSS."""
    refuse_other(config, mlp_bias=False)
    bias = {"qkv_bias": bool(config["attention_bias"]), "output_bias": bool(config["attention_out_bias"])}
    return decoder(config) | bias


def ernie4_5(config: Config) -> Config:
    """Fields of ERNIE 4.5."""
    return decoder(config) | {"linear_bias": bool(config["use_bias"])}


def smollm3(config: Config) -> Config:
    """SmolLM3: every fourth layer has no positions."""
    fields = llama(config)
    turned = config.get("no_rope_layers")
    if turned is None:
        turned = [
            int((layer + 1) % whole(config, "no_rope_layer_interval") != 0)
            for layer in range(fields["layers"])
        ]
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window true of a smollm3 is not supported")
    # Layers of windows as long as the sequence stand for those that turn: all see everything.
    return fields | (
        {
            "attention_pattern": tuple("window" if one else "full" for one in turned),
            "window": fields["max_positions"],
            "rotates_full": False,
        }
        if not all(turned)
        else {}
    )


def starcoder2(config: Config) -> Config:
    """StarCoder 2: layer norms, biases and no gate."""
    fields = decoder(config) | {
        "gated": False,
        "norm": "layernorm",
        "norm_eps": given(config, "norm_epsilon", 1e-5),
        "linear_bias": bool(config["use_bias"]),
    }
    return fields | windows(config, ("window",))


def granite_scales(config: Config) -> Config:
    """The four scaling factors of Granite."""
    return {
        "embedding_scale": number(config, "embedding_multiplier", 1.0),
        "residual_scale": number(config, "residual_multiplier", 1.0),
        "score_scale": number(config, "attention_multiplier", 1.0),
        "logits_scale": 1.0 / number(config, "logits_scaling", 1.0),
    }


def granite(config: Config) -> Config:
    """Granite: Llama with scaling factors."""
    return llama(config) | granite_scales(config)


OLMO3_THETA = 500_000.0
"""The RoPE base of layers with windows if the config.json gives none for them."""


def olmo2(config: Config) -> Config:
    """OLMo 2: norms after attention and MLP only, and over all heads."""
    fields = decoder(config) | biased(config)
    return fields | {"qk_norm": True, "qk_norm_width": "all", "norm_place": "after"}


def olmo3(config: Config) -> Config:
    """OLMo 3: OLMo 2 with windows, whose positions are never stretched."""
    fields = olmo2(config)
    pattern = attention_pattern(config, fields["layers"])
    if pattern is None and config.get("sliding_window"):
        pattern = every_nth("window", "full", 4, fields["layers"])
    found = windows(config, pattern)
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    base = local.get("rope_theta") or OLMO3_THETA
    return fields | found | ({"window_rope_theta": float(base)} if "window" in found else {})


def exaone4(config: Config) -> Config:
    """EXAONE 4: like OLMo 2 with norms of heads; the layers with full attention have no positions."""
    fields = decoder(config) | {"qk_norm": True, "norm_place": "after"}
    layers = fields["layers"]
    pattern = attention_pattern(config, layers)
    if pattern is None and config.get("sliding_window"):
        interval = config.get("sliding_window_pattern")
        if isinstance(interval, str):
            interval = len(interval)
        pattern = every_nth("window", "full", interval or 4, layers)
    found = windows(config, pattern)
    return fields | found | ({"rotates_full": False} if "window" in found else {})


def gemma(config: Config) -> Config:
    """Gemma: scaled embeddings, and norms whose weights are stored minus one."""
    hidden = whole(config, "hidden_size")
    if config.get("hidden_act") == "gelu":
        # The first release says so and means the approximation, as transformers takes it.
        config = config | {"hidden_act": "gelu_pytorch_tanh"}
    return (
        decoder(config)
        | biased(config)
        | {
            "norm_from_one": True,
            "embedding_scale": hidden**0.5,
            "tied": given(config, "tie_word_embeddings", True),
        }
    )


def gemma2(config: Config) -> Config:
    """Gemma 2: norms around attention and MLP, a window in every other layer, capped scores and logits."""
    fields = gemma(config)
    pattern = attention_pattern(config, fields["layers"])
    return (
        fields
        | windows(config, pattern or every_nth("window", "full", 2, fields["layers"]))
        | {
            "norm_place": "around",
            "attention_softcap": number(config, "attn_logit_softcapping", 0.0),
            "logits_softcap": number(config, "final_logit_softcapping", 0.0),
            "score_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        }
    )


def gemma3(config: Config) -> Config:
    """Gemma 3: five of six layers have windows and their own RoPE base; queries and keys have norms."""
    fields = gemma(config)
    refuse_other(config, use_bidirectional_attention=False)
    pattern = attention_pattern(config, fields["layers"])
    interval = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    base = config.get("rope_local_base_freq") or local.get("rope_theta") or 10_000.0
    return (
        fields
        | windows(config, pattern or every_nth("window", "full", interval, fields["layers"]))
        | {
            "norm_place": "around",
            "qk_norm": True,
            "window_rope_theta": float(base),
            "attention_softcap": number(config, "attn_logit_softcapping", 0.0),
            "logits_softcap": number(config, "final_logit_softcapping", 0.0),
            "score_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        }
    )
