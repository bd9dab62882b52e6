"""Parameters and activations of what pipeline ranks are made of: layers, embedding and head on one device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from costmodels.layers.operators import padded_vocabulary
from costmodels.layers.shapes import attention_widths, element_bytes, tokens
from costmodels.memory.activations import activation_bytes, output_gradient_bytes
from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.engine import Engine
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable


@dataclass(frozen=True)
class UnitSizes:
    """Sizes of one layer, embedding and head on one device; arrays of shape [n].

    Parameters are counts; activations are bytes of one micro batch.
    """

    dense_layer: Floats
    """Parameters of a layer with a dense MLP."""
    moe_layer: Floats
    """Parameters of a layer with experts, without the routed experts."""
    experts: Floats
    """Parameters of the routed experts of a layer."""
    embedding: Floats
    head: Floats
    """Parameters of final norm and output matrix; the matrix of a tied head counts with pp > 1 only."""
    dense_activations: Floats
    """Bytes from forward to backward."""
    moe_activations: Floats
    dense_recomputation: Floats
    """Bytes that backward computes again, one layer at a time."""
    moe_recomputation: Floats
    dense_offload: Floats
    """Bytes in host memory, but for those layers that backward uses or is about to."""
    moe_offload: Floats
    dense_plain_activations: Floats
    """Bytes of layers that recompute nothing while others do."""
    moe_plain_activations: Floats
    dense_plain_offload: Floats
    moe_plain_offload: Floats
    output_gradients: Floats
    """Gradients of a layer's activations that wait for those of its weights, when backward is split."""
    logits: Floats
    logit_gradients: Floats
    """Gradients of the logits, which wait for those of the output matrix."""
    layer_input: Floats
    """The input of a layer, gathered over tensor-parallel ranks that split its sequence; otherwise 0."""
    layer_tables: Floats
    """Bytes that each layer has for good besides its states."""
    score_reserve: Floats
    """Bytes of the blocks of one layer's attention scores that the allocator cannot use."""


def _attention_parameters(model: ModelSpec, tp: Floats) -> tuple[Floats, Floats]:
    """Parameters of one attention block and its norm: split over `tp`, and held by every rank."""
    h, norm = model.hidden, model.norm_parameters
    mla = model.latent_attention
    if mla is not None:
        queries, values = attention_widths(model)
        down = h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) + values * h
        up += (mla.q_lora_rank or h) * queries
        down += mla.q_lora_rank * (h + 1) + h * model.linear_bias
        return up / tp, norm + down + 0 * tp
    bias = model.linear_bias or model.qkv_bias
    # Ranks that share a key/value head split its weights too.
    kv = 2 * model.kv_heads * model.head_dim
    split = ((model.q_size + kv) * (h + bias) + model.q_size * h) / tp
    return split, norm + model.linear_bias * h + 2 * model.head_dim * model.qk_norm + 0 * tp


def _mlp_parameters(model: ModelSpec, width: int, degree: Floats) -> Floats:
    """Parameters of one MLP split over `degree` ranks; all hold the bias of its output."""
    inputs = 1 + model.gated
    split = width * (inputs * (model.hidden + model.linear_bias) + model.hidden)
    return split / degree + model.linear_bias * model.hidden


def unit_sizes(model: ModelSpec, engine: Engine, table: LayoutTable) -> UnitSizes:
    """Sizes of the units of every row.

    The loss keeps the logits, their gradient and `logits_copies` in fp32, next to the input of the
    final norm and of the output matrix (arXiv:2205.05198, section 4.3).
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp = table.tensor_parallel.astype(np.float64)
    part = np.where(table.sequence_parallel, tp, 1.0)
    h, zero = model.hidden, np.zeros(len(table))
    split, whole = _attention_parameters(model, tp)
    attention = split + whole
    mlp = _mlp_parameters(model, model.ffn, tp) + model.norm_parameters
    vocabulary = padded_vocabulary(model, table)
    positions = model.max_positions if model.position == "learned" else 0
    has_matrix = (table.pipeline_parallel > 1) | (not model.tied)
    dense_kept, dense_recomputation, dense_offload = activation_bytes(model, engine, table, moe=False)
    moe_layer = experts = moe_kept = moe_recomputation = moe_offload = zero
    if model.experts:
        moe_layer = attention + model.norm_parameters + h * (model.experts + model.shared_expert_gate)
        if model.shared_expert_ffn:
            moe_layer = moe_layer + _mlp_parameters(model, model.shared_expert_ffn, tp)
        expert = _mlp_parameters(model, model.expert_ffn, table.expert_tensor_parallel.astype(np.float64))
        experts = model.experts / table.expert_parallel * expert
        moe_kept, moe_recomputation, moe_offload = activation_bytes(model, engine, table, moe=True)
    dense_plain = moe_plain = dense_plain_offload = moe_plain_offload = zero
    if table.recompute_method.any():
        plain = replace(
            table,
            recompute=np.zeros_like(table.recompute),
            recompute_modules=np.zeros_like(table.recompute_modules),
        )
        dense_plain, _, dense_plain_offload = activation_bytes(model, engine, plain, moe=False)
        if model.experts:
            moe_plain, _, moe_plain_offload = activation_bytes(model, engine, plain, moe=True)
    shown = t * vocabulary / (1 if engine.loss.gathers_logits else tp)
    copies: Floats | float = engine.loss.logits_copies
    if engine.loss.split_logits_copies is not None:
        copies = np.where(tp > 1, engine.loss.split_logits_copies, copies)
    logits = shown * (2 * e + 4 * copies)
    head_input = e * t * h / (part if engine.activations.regathers_sequence else 1)
    return UnitSizes(
        dense_layer=attention + mlp,
        moe_layer=moe_layer,
        experts=experts,
        embedding=vocabulary * h / tp + positions * h,
        head=has_matrix * vocabulary * h / tp + model.norm_parameters,
        dense_activations=dense_kept,
        moe_activations=moe_kept,
        dense_recomputation=dense_recomputation,
        moe_recomputation=moe_recomputation,
        dense_offload=dense_offload,
        moe_offload=moe_offload,
        dense_plain_activations=dense_plain,
        moe_plain_activations=moe_plain,
        dense_plain_offload=dense_plain_offload,
        moe_plain_offload=moe_plain_offload,
        output_gradients=output_gradient_bytes(model, table),
        logit_gradients=e * shown,
        logits=logits + e * t * h / part + head_input,
        layer_input=e * t * h * (part > 1),
        score_reserve=t
        * model.seq
        * model.heads
        / tp
        * engine.allocator.score_reserve
        * (not engine.attention.flash),
        layer_tables=zero + 4.0 * model.seq * model.head_dim * engine.allocator.rotary_tables,
    )


def end_parameters(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Parameters of embedding and head on one device of each pipeline rank, [n, k]."""
    return ranks.first * sizes.embedding[:, None] + ranks.last * sizes.head[:, None]


def rank_parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Parameters of each pipeline rank on one device, [n, k]: all but routed experts, and routed experts."""
    shared = ranks.all_dense * sizes.dense_layer[:, None] + end_parameters(sizes, ranks)
    if not sizes.experts.any():
        return shared, np.zeros_like(shared)
    return shared + ranks.all_moe * sizes.moe_layer[:, None], ranks.all_moe * sizes.experts[:, None]


def row_unit_sizes(model: ModelSpec, engine: Engine, shapes: LayoutTable, shape: Ints) -> UnitSizes:
    """Parameters and activations of every row; `shape` says which row of `shapes` each is like."""
    every = unit_sizes(model, engine, shapes)
    return UnitSizes(**{field.name: getattr(every, field.name)[shape] for field in fields(UnitSizes)})
