"""`config.json` of models with experts: from its keys to the fields of `ModelSpec`."""

from __future__ import annotations

from planner.inputs.huggingface.dense import biased, decoder, granite_scales, late_windows, qwen3
from planner.inputs.huggingface.keys import (
    Config,
    attention_pattern,
    every_nth,
    given,
    number,
    one_of,
    period,
    refuse_other,
    whole,
    windows,
)


def mixtral(config: Config) -> Config:
    """Fields of Mixtral."""
    return (
        decoder(config)
        | windows(config, ("window",))
        | {
            "experts": whole(config, "num_local_experts"),
            "top_k": whole(config, "num_experts_per_tok"),
            "expert_ffn": whole(config, "intermediate_size"),
            "router": {"score": "softmax", "normalised": True},
        }
    )


def granitemoe(config: Config) -> Config:
    """Fields of Granite with experts."""
    return mixtral(config) | biased(config) | granite_scales(config)


def _qwen_experts(config: Config) -> Config:
    layers, step = whole(config, "num_hidden_layers"), whole(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers {dense!r} is not a list of numbers of layers")
    kinds = ["dense" if layer in dense or (layer + 1) % step else "experts" for layer in range(layers)]
    found = {
        "experts": whole(config, "num_local_experts", 0) or whole(config, "num_experts"),
        "top_k": whole(config, "num_experts_per_tok"),
        "expert_ffn": whole(config, "moe_intermediate_size"),
        "router": {"score": "softmax", "normalised": given(config, "norm_topk_prob", False)},
    }
    return found | mlp_fields(kinds)


def mlp_fields(kinds: list[str]) -> Config:
    """The fields of MLPs from the kind of each layer: a number of leading dense layers, or a pattern."""
    leading = kinds.index("experts") if "experts" in kinds else len(kinds)
    if all(kind == "experts" for kind in kinds[leading:]):
        return {"dense_layers": leading}
    return {"mlp_pattern": period(kinds)}


def _shared_expert(config: Config) -> Config:
    shared = whole(config, "shared_expert_intermediate_size")
    return {"shared_expert_ffn": shared, "shared_expert_gate": shared > 0}


def qwen2_moe(config: Config) -> Config:
    """Fields of Qwen 1.5 and 2 with experts."""
    fields = decoder(config) | {"qkv_bias": given(config, "qkv_bias", True)} | late_windows(config)
    return fields | _qwen_experts(config) | _shared_expert(config)


def qwen3_moe(config: Config) -> Config:
    """Fields of Qwen 3 with experts."""
    return qwen3(config) | _qwen_experts(config)


def _gated_delta(config: Config) -> Config:
    """Three of four layers are Gated DeltaNet; the others have gated attention, and norms of heads."""
    layers = whole(config, "num_hidden_layers")
    pattern = attention_pattern(config, layers)
    interval = whole(config, "full_attention_interval", 4)
    return {
        "qk_norm": True,
        "attention_gate": True,
        "norm_from_one": True,
        "attention_pattern": pattern or every_nth("linear", "full", interval, layers),
        "linear_attention": {
            "kind": "gated_delta",
            "key_heads": whole(config, "linear_num_key_heads"),
            "value_heads": whole(config, "linear_num_value_heads"),
            "key_dim": whole(config, "linear_key_head_dim"),
            "value_dim": whole(config, "linear_value_head_dim"),
            "conv_kernel": whole(config, "linear_conv_kernel_dim"),
        },
    }


def qwen3_next(config: Config) -> Config:
    """Fields of Qwen3-Next."""
    fields = decoder(config) | biased(config) | _gated_delta(config)
    return fields | _qwen_experts(config) | _shared_expert(config)


def qwen3_5(config: Config) -> Config:
    """Fields of Qwen 3.5 without experts."""
    return decoder(config) | biased(config) | _gated_delta(config)


def qwen3_5_moe(config: Config) -> Config:
    """Qwen 3.5 with experts, whose weights always add up to one."""
    width = {"intermediate_size": given(config, "intermediate_size", whole(config, "moe_intermediate_size"))}
    return qwen3_next(config | width | {"norm_topk_prob": True})


def gpt_oss(config: Config) -> Config:
    """gpt-oss: every other layer has a window, all heads have sinks, all linear layers have biases."""
    refuse_other(config, swiglu_alpha=1.702, swiglu_limit=7.0)
    fields = decoder(config)
    pattern = attention_pattern(config, fields["layers"])
    return (
        fields
        | windows(config, pattern or every_nth("window", "full", 2, fields["layers"]))
        | {
            "linear_bias": bool(config["attention_bias"]),
            "attention_sinks": True,
            "activation": "clamped_silu",
            "experts": whole(config, "num_local_experts"),
            "top_k": whole(config, "num_experts_per_tok"),
            "expert_ffn": whole(config, "intermediate_size"),
            "router": {"score": "softmax", "normalised": True, "bias": True},
        }
    )


def minimax_m2(config: Config) -> Config:
    """MiniMax-M2: norms over all heads, and sigmoid scores with a bias for each expert."""
    fields = decoder(config)
    if config.get("rotary_dim"):
        # Published before transformers had the type, which calls it by the part of a head.
        fields["rotary_dim"] = whole(config, "rotary_dim") % fields["head_dim"]
    return fields | {
        "qk_norm": True,
        "qk_norm_width": "all",
        "experts": whole(config, "num_local_experts"),
        "top_k": whole(config, "num_experts_per_tok"),
        "expert_ffn": whole(config, "intermediate_size"),
        "router": {"score": "sigmoid", "normalised": True, "expert_bias": True},
    }


def llama4(config: Config) -> Config:
    """Llama 4: three of four layers attend to chunks, the others have no positions; one expert and a shared
    one in every layer, or in every other one."""
    fields = decoder(config) | biased(config)
    layers, step = fields["layers"], whole(config, "interleave_moe_layer_step", 1)
    routed = config.get("moe_layers")
    if routed is None:
        routed = range(step - 1, layers, step)
    kinds = ["experts" if layer in routed else "dense" for layer in range(layers)]
    pattern = attention_pattern(config, layers)
    interval = whole(config, "no_rope_layer_interval", 4)
    width = whole(config, "intermediate_size")
    return (
        fields
        | mlp_fields(kinds)
        | windows(config, pattern or every_nth("chunk", "full", interval, layers), "attention_chunk_size")
        | {
            "rotates_full": False,
            "ffn": whole(config, "intermediate_size_mlp"),
            "experts": whole(config, "num_local_experts"),
            "top_k": whole(config, "num_experts_per_tok"),
            "expert_ffn": width,
            "shared_expert_ffn": width,
            "router": {"score": "sigmoid", "normalised": False, "weighs_inputs": True},
            "qk_norm": bool(config.get("use_qk_norm")),
            "qk_norm_weights": False,
            "score_growth": _score_growth(config),
        }
    )


def _score_growth(config: Config) -> Config | None:
    if not config.get("attn_temperature_tuning"):
        return None
    return {"positions": whole(config, "floor_scale"), "factor": number(config, "attn_scale", 0.1)}


def ernie4_5_moe(config: Config) -> Config:
    """Fields of ERNIE 4.5 with experts."""
    fields = decoder(config) | {"linear_bias": bool(config["use_bias"])}
    layers, first = fields["layers"], whole(config, "moe_layer_start_index")
    last, step = whole(config, "moe_layer_end_index", -1), whole(config, "moe_layer_interval", 1)
    last = last % layers if last < 0 else last
    kinds = [
        "experts" if first <= layer <= last and (layer + 1) % step == 0 else "dense"
        for layer in range(layers)
    ]
    width = whole(config, "moe_intermediate_size")
    return (
        fields
        | mlp_fields(kinds)
        | {
            "experts": whole(config, "moe_num_experts"),
            "top_k": whole(config, "moe_k"),
            "expert_ffn": width,
            "shared_expert_ffn": whole(config, "moe_num_shared_experts", 0) * width,
            "router": {"score": "softmax", "normalised": True, "expert_bias": True},
        }
    )


def _deepseek_layers(config: Config) -> Config:
    if given(config, "moe_layer_freq", 1) != 1:
        raise ValueError(
            f"moe_layer_freq {config['moe_layer_freq']} is not supported: experts must be in every layer "
            "after the leading dense ones (1)"
        )
    width = whole(config, "moe_intermediate_size")
    leading = {"dense_layers": whole(config, "first_k_dense_replace", 0)}
    kinds = config.get("mlp_layer_types")
    if kinds:
        leading = mlp_fields(["dense" if kind == "dense" else "experts" for kind in kinds])
    return leading | {
        "experts": whole(config, "n_routed_experts"),
        "top_k": whole(config, "num_experts_per_tok"),
        "expert_ffn": width,
        "shared_expert_ffn": whole(config, "n_shared_experts", 0) * width,
    }


def _latent(config: Config) -> Config:
    nope, turned = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim")
    # Their head_dim is what positions turn.
    return decoder(config | {"head_dim": None}) | {
        "kv_heads": whole(config, "num_attention_heads"),
        "head_dim": nope + turned,
        "rotary_dim": 0,
        "latent_attention": {
            "q_lora_rank": config.get("q_lora_rank") or 0,
            "kv_lora_rank": whole(config, "kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": turned,
            "v_head_dim": whole(config, "v_head_dim"),
        },
    }


def _deepseek(config: Config) -> Config:
    refuse_other(config, attention_bias=False, mlp_bias=False)
    return _latent(config) | _deepseek_layers(config)


def deepseek_v2(config: Config) -> Config:
    """Fields of DeepSeek-V2."""
    one_of(config, "scoring_func", ("softmax",))
    if config.get("norm_topk_prob"):
        # DeepSeek's own model then leaves out routed_scaling_factor, Transformers ignores the key.
        raise ValueError(
            f"norm_topk_prob {config['norm_topk_prob']!r} of a deepseek_v2 is not supported: implementations "
            "of the model disagree about it, give false"
        )
    router = {
        "score": "softmax",
        "normalised": False,
        "scale": given(config, "routed_scaling_factor", 1.0),
    }
    if one_of(config, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy":
        router |= {"groups": config["n_group"], "top_groups": config["topk_group"], "group_score": "max"}
    return _deepseek(config) | {"router": router}


def _sigmoid_router(config: Config, groups: int = 1, top_groups: int = 1, scale: float = 1.0) -> Config:
    one_of(config, "scoring_func", ("sigmoid",))
    one_of(config, "topk_method", ("noaux_tc",))
    return {
        "score": "sigmoid",
        "normalised": given(config, "norm_topk_prob", True),
        "scale": given(config, "routed_scaling_factor", scale),
        "groups": given(config, "n_group", groups),
        "top_groups": given(config, "topk_group", top_groups),
        "group_score": "top2",
        "expert_bias": True,
    }


def deepseek_v3(config: Config) -> Config:
    """Fields of DeepSeek-V3, R1 and Kimi K2."""
    further = {"mtp_layers": whole(config, "num_nextn_predict_layers", 0)}
    return _deepseek(config) | further | {"router": _sigmoid_router(config, 8, 4, 2.5)}


def glm4_moe_lite(config: Config) -> Config:
    """GLM-4.7 Flash: DeepSeek-V3's layers, of which the first is dense."""
    leading = {"first_k_dense_replace": given(config, "first_k_dense_replace", 1)}
    return deepseek_v3(config | leading)


def deepseek_v32(config: Config) -> Config:
    """DeepSeek-V3.2: an indexer chooses the positions that attention reads."""
    indexer = {
        "heads": whole(config, "index_n_heads"),
        "head_dim": whole(config, "index_head_dim"),
        "top_k": whole(config, "index_topk"),
    }
    return deepseek_v3(config) | {"indexer": indexer}


def glm_moe_dsa(config: Config) -> Config:
    """GLM-5: like DeepSeek-V3.2; from 5.2 on some layers reuse the positions chosen by another layer's
    indexer."""
    fields = deepseek_v32(config)
    layers, kinds = fields["layers"], config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        every = max(1, whole(config, "index_topk_freq", 1))
        offset = whole(config, "index_skip_topk_offset", 2)
        kinds = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(layers)]
    kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
    unknown = [kind for kind in kinds if kind not in ("full", "shared")]
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"indexer_types has {unknown[0]!r}, and only full and shared are known"
            if unknown
            else f"indexer_types has {len(kinds)} entries for num_hidden_layers {layers}"
        )
    return fields | {"indexer": fields["indexer"] | {"share": kinds.count("full") / layers}}


def glm4_moe(config: Config) -> Config:
    """GLM-4.5 to 4.7: grouped queries, and DeepSeek-V3's experts."""
    head = whole(config, "hidden_size") // max(1, whole(config, "num_attention_heads"))
    return (
        decoder(config | {"head_dim": given(config, "head_dim", head)})
        | {
            "qkv_bias": bool(config.get("attention_bias")),
            "qk_norm": bool(config.get("use_qk_norm")),
            "mtp_layers": whole(config, "num_nextn_predict_layers", 0),
            "router": _sigmoid_router(config),
        }
        | _deepseek_layers(config)
    )
