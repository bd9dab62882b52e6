"""Model FLOPs of a sequence by formula, from which utilisation (MFU) is computed."""

from __future__ import annotations

from collections import Counter

from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LayerKind


def flops_per_sequence(model: ModelSpec) -> float:
    """Model FLOPs of forward and backward for one sequence of `seq` tokens.

    Megatron-LM's convention since core 0.12 (training.py `num_floating_point_operations`): 6 per weight of a
    GEMM and token, the causal half of core attention, no recomputation, no router. Weights that are frozen
    under adapters have no gradients, so they count 4; adapters are not counted. Each MTP module counts as a
    layer, its projection of two inputs, and the head once more.
    """
    s, h = model.seq, model.hidden
    kinds = (
        [model.layer_kind(layer) for layer in range(model.layers)]
        if not model.is_uniform or model.mlp_pattern
        else [model.layer_kind(0)] * (model.layers - model.moe_layers)
        + [model.layer_kind(model.layers - 1)] * model.moe_layers
    )
    kinds += [model.layer_kind(model.layers - 1)] * model.mtp_depths
    layers = sum(count * _layer_flops(model, kind) for kind, count in Counter(kinds).items())
    ends = h * model.vocab * (1 + model.mtp_depths) + 2 * h * h * model.mtp_depths
    return _flops_of_weight(model) * s * ends + layers


def _flops_of_weight(model: ModelSpec) -> float:
    return 6.0 if model.lora is None else 4.0


def _layer_flops(model: ModelSpec, kind: LayerKind) -> float:
    """FLOPs of forward and backward of one layer for one sequence."""
    s, h, mla, each = model.seq, model.hidden, model.latent_attention, _flops_of_weight(model)
    matrices = 3 if model.gated else 2
    routed = model.top_k * model.expert_ffn + model.shared_expert_ffn
    width = {"dense": model.ffn, "experts": routed, "none": 0}[kind.mlp]
    weights = matrices * h * width + model.other_layer_parameters
    if kind.attention == "none":
        return each * s * weights
    if kind.attention == "linear":
        linear = model.linear_attention
        assert linear is not None
        projections = h * (linear.entry_size + linear.value_size)
        return each * s * (weights + projections) + 3.0 * s * linear.flops_per_token()
    if mla is not None:
        projections = model.attention_parameters(kind.attention)
        qk, v = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), model.heads * mla.v_head_dim
    else:
        gate = model.q_size * model.attention_gate
        projections = h * (model.q_size + gate + 2 * model.kv_size) + model.q_size * h
        qk = v = model.q_size
    scored = 3.0 * s * s * model.score_share(kind.attention) * (qk + v)
    scored += 3.0 * s * s * model.index_width(kind.attention)
    return each * s * (weights + projections) + scored
