"""`config.json` of Gemma 4, whose layers differ in more than their windows."""

from __future__ import annotations

from planner.inputs.huggingface.dense import gemma3
from planner.inputs.huggingface.keys import Config, whole


def gemma4(config: Config) -> Config:
    """Gemma 4:

    Gemma 3 with larger heads in layers with full attention, and per-layer inputs. The parameters of further
    features are counted as a mean over layers: the larger heads; keys that are values too; the last layers,
    which share keys and values of others and have wider MLPs; the gate and projection of per-layer inputs,
    with their embeddings and norms; the norms beside experts.
    """
    if config.get("use_bidirectional_attention") == "vision":
        # Of the tokens of one image only; those of text see none after them.
        config = config | {"use_bidirectional_attention": None}
    fields = gemma3(config | {"query_pre_attn_scalar": 1.0}) | {"norm_from_one": False}
    layers, hidden = fields["layers"], fields["hidden"]
    routed = _experts(config) if config.get("enable_moe_block") else {}
    own = whole(config, "hidden_size_per_layer_input", 0)
    each = (2 * own * hidden + hidden) * (own > 0)
    if routed:
        # Norms of the MLP's output, of the experts' input and output; scales of the router.
        each += 4 * hidden + routed["experts"]
    further = layers * each + _beyond_windows(config, fields)
    if further < 0:
        large, taking = config.get("global_head_dim"), config.get("num_kv_shared_layers")
        raise ValueError(
            f"global_head_dim {large} and num_kv_shared_layers {taking} leave too few parameters"
        )
    embedded = own * whole(config, "vocab_size_per_layer_input", 0) * layers + own * (layers * hidden + 1)
    mean, rest = divmod(further, layers)
    return (
        fields
        | routed
        | {"other_layer_parameters": mean, "other_parameters": rest + (embedded if own else 0)}
    )


def _experts(config: Config) -> Config:
    """Experts in every layer, besides an MLP that processes all tokens."""
    return {
        "experts": whole(config, "num_experts"),
        "top_k": whole(config, "top_k_experts"),
        "expert_ffn": whole(config, "moe_intermediate_size"),
        "shared_expert_ffn": whole(config, "intermediate_size"),
        "router": {"score": "softmax", "normalised": True},
    }


def _beyond_windows(config: Config, fields: Config) -> int:
    """Parameters of all layers beyond those of a model whose layers all have windows."""
    layers, hidden, heads = fields["layers"], fields["hidden"], fields["heads"]
    head, few = whole(config, "head_dim"), fields["kv_heads"]
    large, same = whole(config, "global_head_dim", 512), bool(config.get("attention_k_eq_v"))
    # As transformers, which heeds this number only where keys are values.
    kept = whole(config, "num_global_key_value_heads", few) if same else few
    pattern = fields.get("attention_pattern", ("full",))
    taking = whole(config, "num_kv_shared_layers", 0)
    if not 0 <= taking < layers:
        raise ValueError(f"num_kv_shared_layers {taking} is not one of 0 to {layers - 1}")
    wider = 3 * hidden * fields["ffn"] * bool(config.get("use_double_wide_mlp"))
    found: int = -layers * (hidden * head * (2 * heads + 2 * few) + 2 * head)
    for layer in range(layers):
        sees_all, takes = pattern[layer % len(pattern)] == "full", layer >= layers - taking
        size, kv = (large, kept) if sees_all else (head, few)
        matrices = 0 if takes else 1 if sees_all and same else 2
        found += hidden * size * (2 * heads + matrices * kv) + size * (1 if takes else 2) + wider * takes
    return found
