"""`config.json` of models whose layers are each either attention, a state space, an MLP or experts."""

from __future__ import annotations

from planner.inputs.huggingface.keys import Config, activation, entries, given, whole

MIXERS = {
    "linear_attention": ("linear", "none"),
    "mamba": ("linear", "none"),
    "M": ("linear", "none"),
    "full_attention": ("full", "none"),
    "attention": ("full", "none"),
    "*": ("full", "none"),
    "moe": ("none", "experts"),
    "E": ("none", "experts"),
    "mlp": ("none", "dense"),
    "-": ("none", "dense"),
}
"""Attention and MLP of a layer, by its name in `layers_block_type` or `hybrid_override_pattern`."""


def nemotron_h(config: Config) -> Config:
    """Nemotron-H and Nemotron 3: Mamba-2, attention without positions, and squared-ReLU MLPs or experts."""
    pattern = config.get("hybrid_override_pattern")
    names = list(pattern) if isinstance(pattern, str) else entries(config, "layers_block_type")
    names = names or ["linear_attention", "moe", "full_attention", "mlp"]
    unknown = [name for name in names if name not in MIXERS]
    if unknown:
        raise ValueError(f"layers_block_type has {unknown[0]!r}, and only {', '.join(MIXERS)} are known")
    if config.get("moe_latent_size"):
        raise ValueError(f"moe_latent_size {config['moe_latent_size']} is not supported: only null is")
    heads = whole(config, "num_attention_heads")
    bias = bool(given(config, "attention_bias", False))
    mlps = [MIXERS[name][1] for name in names]
    fields: Config = {
        "layers": len(names),
        "hidden": whole(config, "hidden_size"),
        "ffn": whole(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": whole(config, "num_key_value_heads"),
        "head_dim": whole(config, "head_dim"),
        "vocab": whole(config, "vocab_size"),
        "max_positions": whole(config, "max_position_embeddings"),
        "activation": activation(given(config, "mlp_hidden_act", "relu2")),
        "norm": "rmsnorm",
        "norm_eps": given(config, "layer_norm_epsilon", 1e-5),
        "position": "none",
        "tied": given(config, "tie_word_embeddings", False),
        "linear_bias": bool(given(config, "mlp_bias", False)),
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_pattern": tuple(MIXERS[name][0] for name in names),
        "mlp_pattern": tuple(mlps),
        "linear_attention": {
            "kind": "mamba2",
            "key_heads": whole(config, "n_groups"),
            "key_dim": whole(config, "ssm_state_size"),
            "value_heads": whole(config, "mamba_num_heads"),
            "value_dim": whole(config, "mamba_head_dim"),
            "conv_kernel": whole(config, "conv_kernel"),
            "conv_bias": bool(given(config, "use_conv_bias", True)),
            "chunk": whole(config, "chunk_size", 128),
        },
    }
    if "experts" not in mlps:
        return fields
    return fields | {
        "experts": whole(config, "n_routed_experts"),
        "top_k": whole(config, "num_experts_per_tok"),
        "expert_ffn": whole(config, "moe_intermediate_size"),
        "shared_expert_ffn": whole(config, "n_shared_experts", 0)
        * whole(config, "moe_shared_expert_intermediate_size", 0),
        "router": {
            "score": "sigmoid",
            "normalised": given(config, "norm_topk_prob", True),
            "scale": given(config, "routed_scaling_factor", 1.0),
            "groups": given(config, "n_group", 1),
            "top_groups": given(config, "topk_group", 1),
            "group_score": "top2",
            "expert_bias": True,
        },
    }
