"""Bytes of the tensors that layers, embedding and head are made of, by the names of `structure`."""

from __future__ import annotations

import numpy as np

from costmodels.layers.operators import padded_vocabulary
from costmodels.layers.shapes import (
    PEAK_LOAD,
    attention_widths,
    element_bytes,
    key_value_width,
    tokens,
    whole_heads_width,
)
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, LayoutTable

SUMS_MULTIPLE = 32
"""The memory-efficient attention kernel rounds log-sum-exps up to a multiple of this many tokens."""

Sizes = dict[str, Floats]
"""Bytes by name, each [n]."""


def tensor_sizes(model: ModelSpec, table: LayoutTable) -> Sizes:
    """Bytes of every tensor on one device, for one micro batch."""
    e, t = element_bytes(table.precision), tokens(model, table)
    tp = table.tensor_parallel.astype(np.float64)
    part = np.where(table.sequence_parallel, tp, 1.0)
    h = model.hidden
    queries, values = attention_widths(model)
    if model.latent_attention is None:
        heads = np.maximum(model.kv_heads / tp, 1.0)
        keys = values_here = heads * model.head_dim
    else:
        keys, values_here = queries / tp, values / tp
    vocabulary = padded_vocabulary(model, table) / tp
    real = np.minimum(model.vocab, vocabulary)
    ones = np.ones(len(table))
    mla = model.latent_attention
    query_input = h if mla is None else mla.q_lora_rank or h
    cp = table.context_parallel
    repeated = whole_heads_width(model, table) / key_value_width(model, table)
    rounded = np.ceil(model.seq / cp / SUMS_MULTIPLE) * SUMS_MULTIPLE * cp / model.seq
    pads_sums = table.precision in ("fp32", "tf32") or model.latent_attention is not None
    return (
        _latent_sizes(model, table)
        | _expert_sizes(model, table)
        | {
            "pair": e * t * (keys + values_here),
            "gathered_pair": e * t * cp * (keys + values_here),
            "whole_key": e * t * cp * keys,
            "whole_value": e * t * cp * values_here,
            "repeated_key": e * t * keys * repeated,
            "repeated_value": e * t * values_here * repeated,
            "travelling": e * t * (queries / tp + (keys + values_here) * repeated),
            "residual": e * t * h / part,
            "whole": e * t * h,
            "query": e * t * queries / tp,
            "key": e * t * keys,
            "value": e * t * values_here,
            "attended": e * t * values / tp,
            "inner": e * t * model.ffn / tp,
            "log_sum_exp": 4 * t * model.heads / tp * (rounded if pads_sums else 1.0),
            "attention_scores": 4 * t * model.seq * model.heads / tp,
            "attention_mask": float(model.seq) ** 2 * ones,
            "statistics": (8 if model.norm == "layernorm" else 4) * t / part,
            "query_statistics": 4 * t * model.heads / tp,
            "key_statistics": 4 * t * np.maximum(model.kv_heads / tp, 1.0),
            "width": e * h * ones,
            "head_width": e * model.head_dim * ones,
            "query_bias": e * queries / tp,
            "key_bias": e * model.kv_size / tp,
            "value_bias": e * model.kv_size / tp,
            "inner_bias": e * model.ffn / tp,
            "token": t,
            "position": t / table.micro_batch_size / part,
            "query_weight": e * query_input * queries / tp,
            "key_weight": e * h * model.kv_size / tp,
            "value_weight": e * h * model.kv_size / tp,
            "key_head": e * h * keys,
            "output_weight": e * h * values / tp,
            "inner_weight": e * h * model.ffn / tp,
            "vocabulary_weight": e * h * vocabulary,
            "position_weight": e * h * model.max_positions * ones,
            "logits": e * t * vocabulary,
            "exponents": 4 * t * real,
            "padded_logits": e * t * vocabulary * ((table.precision != "fp32") | (real < vocabulary)),
        }
    )


def scores_attention(model: ModelSpec, table: LayoutTable) -> Bools:
    """Rows without a fused attention kernel, whose scores are tensors: of grouped queries in fp32."""
    wide = table.precision in ("fp32", "tf32")
    here = model.heads / table.tensor_parallel
    grouped: Bools = here != np.maximum(model.kv_heads / table.tensor_parallel, 1.0)
    return grouped & (wide and model.latent_attention is None)


def _latent_sizes(model: ModelSpec, table: LayoutTable) -> Sizes:
    """What latent attention has besides; nothing in models without."""
    mla = model.latent_attention
    if mla is None:
        return {}
    e, t = element_bytes(table.precision), tokens(model, table)
    tp = table.tensor_parallel.astype(np.float64)
    own = e * t / np.where(table.sequence_parallel, tp, 1.0)
    h, rank = model.hidden, mla.q_lora_rank
    entry = (rank or h) + mla.kv_lora_rank + mla.qk_rope_head_dim
    each = mla.qk_nope_head_dim + mla.v_head_dim
    ones = np.ones(len(table))
    padded = e * t * model.heads * max(mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim) / tp
    return {
        "padded": padded,
        "padded_whole": padded * table.context_parallel,
        "latent_query": own * rank,
        "latent": own * (mla.kv_lora_rank + mla.qk_rope_head_dim),
        "latent_key": own * mla.kv_lora_rank,
        "latent_statistics": 4 * own / e,
        "compressed": own * entry,
        "entered": e * t * entry,
        "entered_query": e * t * (rank or h),
        "entered_key": e * t * mla.kv_lora_rank,
        "rotary_part": own * mla.qk_rope_head_dim,
        "key_value": e * t * model.heads * each / tp,
        "rotary_query": e * t * model.heads * mla.qk_rope_head_dim / tp,
        "rotary_key": e * t * mla.qk_rope_head_dim,
        "latent_query_weight": e * h * rank * ones,
        "latent_weight": e * h * (mla.kv_lora_rank + mla.qk_rope_head_dim) * ones,
        "key_value_weight": e * mla.kv_lora_rank * model.heads * each / tp,
    }


def _expert_sizes(model: ModelSpec, table: LayoutTable) -> Sizes:
    """What experts have besides; nothing in models without.

    Rows are as even as `runtime.dryrun` assumes: the fullest rank gets `PEAK_LOAD` times the mean.
    """
    if not model.experts:
        return {}
    e, h = element_bytes(table.precision), model.hidden
    tp, ep, etp = (
        column.astype(np.float64)
        for column in (table.tensor_parallel, table.expert_parallel, table.expert_tensor_parallel)
    )
    limit = model.router.capacity_factor
    tokens_here = tokens(model, table) / tp
    pairs = tokens_here * model.top_k
    gathered = np.where(ep > 1, 1.0, etp)
    sent = np.floor(pairs * min(1.0, limit or 1.0)) * gathered
    arrived = np.where(ep > 1, np.floor(pairs * min(PEAK_LOAD, limit or PEAK_LOAD)), sent)
    rows = np.where(ep > 1, arrived * etp, sent)
    width = model.expert_ffn / etp
    experts = model.experts / ep
    ones = np.ones(len(table))
    return {
        "routed": e * tokens_here * h,
        "routed_wide": 4 * tokens_here * h,
        "tokens_of_rank": e * tokens_here,
        "scores": 4 * tokens_here * model.experts,
        "pair_count": pairs,
        "pair_rows": e * pairs * gathered * h,
        "sent_rows": e * sent * h,
        "arrived": e * arrived * h,
        "rows": e * rows * h,
        "row": rows,
        "expert_inner": e * rows * width,
        "shared_inner": e * tokens(model, table) * model.shared_expert_ffn / tp,
        "router_wide": 4.0 * h * model.experts * ones,
        "router_weight": e * h * model.experts * ones,
        "shared_weight": e * h * model.shared_expert_ffn / tp,
        "shared_bias": e * model.shared_expert_ffn / tp,
        "expert_weight": e * experts * h * width,
        "expert_inner_bias": e * experts * width,
        "expert_bias": e * experts * h,
    }
