"""`config.json` of DeepSeek-V4, whose layers attend to a window and to compressed entries for several
positions."""

from __future__ import annotations

from planner.inputs.huggingface.dense import decoder
from planner.inputs.huggingface.keys import (
    Config,
    entries,
    given,
    number,
    one_of,
    period,
    refuse_other,
    whole,
)

KINDS = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "compressed",
}
"""Kinds of attention by their names in `layer_types`."""

OF_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""Layer types by the entries of `compress_ratios` in the published models."""

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
ROTARY_PART = 64 / 512


def deepseek_v4(config: Config) -> Config:
    """DeepSeek-V4: one key for all heads, which is the value too; compressed entries; hyper-connections;
    experts in all layers.

    Two features cost nothing and are ignored: limits of the experts' gates, and the token table by which the
    first layers choose experts. Parameters of the hyper-connections are counted with each layer's, and at the
    end.
    """
    refuse_other(config, attention_bias=False, mlp_bias=False, n_shared_experts=1, num_key_value_heads=1)
    width, head = whole(config, "moe_intermediate_size"), whole(config, "head_dim")
    fields = decoder(_positions(config) | {"intermediate_size": width})
    layers, hidden, heads = fields["layers"], fields["hidden"], fields["heads"]
    part = number(config, "partial_rotary_factor", ROTARY_PART)
    turned = whole(config, "qk_rope_head_dim", int(head * part))
    rates = RATES | _mapping(config, "compress_rates")
    rate = whole(config, "compress_rate_hca", whole(rates, "heavily_compressed_attention"))
    sparse_rate = whole(config, "compress_rate_csa", whole(rates, "compressed_sparse_attention"))
    groups, streams = whole(config, "o_groups"), whole(config, "hc_mult")
    if not 0 < turned < head or groups < 1 or heads % groups:
        raise ValueError(f"{turned} of head_dim {head} turn, and o_groups {groups} are of {heads} heads")
    weights = (2 + streams) * streams
    _check_mlps(config, layers)
    return fields | {
        "rotary_dim": 0,
        "window": whole(config, "sliding_window"),
        "window_rope_theta": number(_main(config), "rope_theta", 10000.0),
        "attention_pattern": period([KINDS[kind] for kind in _layer_types(config, layers)]),
        "attention_sinks": True,
        "latent_attention": {
            "q_lora_rank": whole(config, "q_lora_rank"),
            "kv_lora_rank": head - turned,
            "qk_nope_head_dim": head - turned,
            "qk_rope_head_dim": turned,
            "v_head_dim": head,
        },
        "compressed_attention": {
            "rate": rate,
            "sparse_rate": sparse_rate,
            "o_groups": groups,
            "o_lora_rank": whole(config, "o_lora_rank"),
        },
        "indexer": {
            "heads": whole(config, "index_n_heads"),
            "head_dim": whole(config, "index_head_dim"),
            "top_k": whole(config, "index_topk"),
        },
        "experts": whole(config, "n_routed_experts"),
        "top_k": whole(config, "num_experts_per_tok"),
        "expert_ffn": width,
        "shared_expert_ffn": width,
        "router": {
            "score": one_of(config, "scoring_func", ("sqrtsoftplus", "softmax", "sigmoid")),
            "normalised": given(config, "norm_topk_prob", True),
            "scale": given(config, "routed_scaling_factor", 1.5),
            "expert_bias": True,
        },
        "mtp_layers": whole(config, "num_nextn_predict_layers", 0),
        "residual_streams": streams,
        # Projection, offsets and three scales of mixing, twice; and those of the sum at the end.
        "other_layer_parameters": 2 * (weights * (streams * hidden + 1) + 3),
        "other_parameters": streams * (streams * hidden + 1) + 1,
    }


def _mapping(config: Config, key: str) -> Config:
    """The mapping of a key; an empty one where it is missing or null."""
    found = given(config, key, {})
    if not isinstance(found, dict):
        raise ValueError(f"{key} is {found!r}, not a mapping")
    return found


def _main(config: Config) -> Config:
    """Positions of the layers that attend to a window only."""
    found: Config = _mapping(config, "rope_parameters").get("main") or config
    return found


def _positions(config: Config) -> Config:
    """The keys with the positions of the layers that attend to compressed entries; only these are
    stretched."""
    stretched = _mapping(config, "rope_parameters").get("compress")
    if stretched:
        return config | {"rope_parameters": stretched, "rope_theta": None, "rope_scaling": None}
    return config | {"rope_theta": number(config, "compress_rope_theta", 160000.0)}


def _layer_types(config: Config, layers: int) -> list[str]:
    """The kind of attention of each layer: listed one by one, by ratios, or the default of both kinds in
    turn."""
    key, names = "layer_types", entries(config, "layer_types")
    if names is None and (ratios := entries(config, "compress_ratios")) is not None:
        unknown = [ratio for ratio in ratios if not isinstance(ratio, int) or ratio not in OF_RATIO]
        if unknown:
            raise ValueError(f"compress_ratios has {unknown[0]!r}, and only 0, 4 and 128 are known")
        key, names = "compress_ratios", [OF_RATIO[ratio] for ratio in ratios]
    if names is None:
        sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
        names = [sparse if layer > 1 and layer % 2 else heavy for layer in range(layers)]
    unknown = [name for name in names if not isinstance(name, str) or name not in KINDS]
    if unknown:
        raise ValueError(f"layer_types has {unknown[0]!r}, and only {', '.join(KINDS)} are known")
    # Entries beyond the layers are of MTP modules.
    if len(names) < layers:
        raise ValueError(f"{key} has {len(names)} entries for num_hidden_layers {layers}")
    return names[:layers]


def _check_mlps(config: Config, layers: int) -> None:
    kinds = entries(config, "mlp_layer_types") or ["moe"] * layers
    unknown = [kind for kind in kinds if kind not in ("hash_moe", "moe")]
    if unknown:
        raise ValueError(f"mlp_layer_types has {unknown[0]!r}, and only hash_moe and moe are known")
