"""Parameters and activations of what pipeline ranks are made of: layers, embedding and head on one device."""

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers import quantised
from costmodels.layers.adapters import block_parameters
from costmodels.layers.mtp import joining_bytes, joining_parameters
from costmodels.layers.operators import padded_vocabulary
from costmodels.layers.optimizer import largest_matrix, orthogonal_bytes, orthogonal_rows
from costmodels.layers.shapes import element_bytes, loss_chunks, tokens
from costmodels.memory.activations import activation_bytes, output_gradient_bytes
from costmodels.memory.dispatch_buffers import dispatch_buffer_bytes
from costmodels.memory.ranges import model_share
from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.engine import Engine
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MlpKind
from costmodels.spec.table import Floats, Ints, LayoutTable


@dataclass(frozen=True)
class UnitSizes:
    """Sizes of one layer, embedding and head on one device; arrays of shape [n].

    Parameters are counts, of those that train; activations are bytes of one microbatch.
    """

    dense_layer: Floats
    """Parameters of a layer with a dense MLP."""
    moe_layer: Floats
    """Parameters of a layer with experts, without the routed experts."""
    experts: Floats
    """Parameters of the routed experts of a layer."""
    embedding: Floats
    head: Floats
    """Parameters of final norm and output matrix; the matrix of a tied head counts with pp > 1 only. Of
    MTP modules too, but for routed experts; with pp > 1 they read an embedding of
    their own where no tied head is one."""
    mtp_experts: Floats
    """Parameters of the routed experts of all these modules."""
    mtp_activations: Floats
    """Bytes that they keep from forward to backward."""
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
    largest_matrix: Floats
    """Parameters of the largest matrix of a layer, where updates are of whole matrices; 0 else."""
    orthogonal_step: Floats
    """Bytes of tensors that the update of that matrix takes, where the engine's are known; 0 else."""
    dense_plain_recomputation: Floats
    """Bytes beside these activations in the backward pass of a layer that recomputes nothing."""
    moe_plain_recomputation: Floats
    dense_plain_offload: Floats
    moe_plain_offload: Floats
    output_gradients: Floats
    """Gradients of a layer's activations that wait for those of its weights, when backward is split."""
    logits: Floats
    logit_gradients: Floats
    """Gradients of the logits that wait for that of the output matrix, or that one itself."""
    kept_logits: Floats
    """The part of `logits` that stays from forward to backward."""
    layer_input: Floats
    """The input of a layer, gathered over tensor-parallel ranks that split its sequence; otherwise 0."""
    layer_output: Floats
    """The output of a layer, which the next stage gets."""
    doubt: Floats
    """Half the width of the range that the tensors of all layouts of the model have, as a share of them."""
    layer_tables: Floats
    """Bytes that each layer has for good besides its states."""
    dispatch_buffers: Floats
    """Bytes of the buffers that exchange tokens of experts, outside of the allocator."""
    score_reserve: Floats
    """Bytes of the blocks of one layer's attention scores that the allocator cannot use."""
    frozen_dense_layer: Floats
    """Parameters of the same that are frozen under adapters, without those in 4 bits."""
    frozen_moe_layer: Floats
    frozen_experts: Floats
    frozen_embedding: Floats
    frozen_head: Floats
    quantised_dense_layer: Floats
    """Bytes of the frozen matrices of a layer in 4 bits."""
    quantised_moe_layer: Floats
    dequantised: Floats
    """Bytes of those that are in the format that computes at a time."""


def _attention_parameters(model: ModelSpec, tp: Floats) -> tuple[Floats, Floats]:
    """Parameters of one attention block of the first layer's kind and its norms: split over `tp`, and held by
    every rank."""
    h, mla, kind = model.hidden, model.latent_attention, model.attention_pattern[0]
    if kind == "none":
        return 0 * tp, 0 * tp
    norm = model.norm_parameters * (2 if model.norm_place == "around" else 1)
    if kind == "linear":
        assert model.linear_attention is not None
        return model.linear_attention.parameters(h) / tp, norm + 0 * tp
    if mla is not None:
        up = mla.split_parameters(h, model.heads, model.compressed_attention)
        up += model.heads * model.attention_sinks
        down = mla.whole_parameters(h, model.compressed_attention) + h * model.linear_bias
        return up / tp, norm + down + model.chooser_parameters(kind) + 0 * tp
    bias = model.linear_bias or model.qkv_bias
    # Ranks that share a key/value head split its weights too.
    kv = 2 * model.kv_heads * model.head_dim
    split = (model.q_size + kv) * (h + bias) + model.q_size * h * (1 + model.attention_gate)
    split += model.heads * model.attention_sinks
    whole = norm + (model.linear_bias or model.output_bias) * h
    norms = model.q_size + model.kv_size if model.qk_norm_width == "all" else 2 * model.head_dim
    return split / tp, whole + norms * (model.qk_norm and model.qk_norm_weights) + 0 * tp


def _mlp_parameters(model: ModelSpec, width: int, degree: Floats) -> Floats:
    """Parameters of one MLP split over `degree` ranks; all hold the bias of its output."""
    inputs = 1 + model.gated
    split = width * (inputs * (model.hidden + model.linear_bias) + model.hidden)
    return split / degree + model.linear_bias * model.hidden


LAYER_ROWS = 9
"""What `_layer` tells."""


def _layer(model: ModelSpec, engine: Engine, table: LayoutTable, mlp: MlpKind) -> Floats:
    """Sizes of a layer of the first layer's kind of attention: parameters outside and inside of routed
    experts that train, and that do not, bytes kept, recomputed and offloaded, and bytes of matrices in 4 bits
    and of those that are dequantised at a time; [`LAYER_ROWS`, n]."""
    tp, h = table.tensor_parallel.astype(np.float64), model.hidden
    norm = model.norm_parameters * (2 if model.norm_place == "around" else 1)
    split, whole = _attention_parameters(model, tp)
    shared, experts = split + whole + model.other_layer_parameters / tp, np.zeros(len(table))
    if mlp == "dense":
        shared = shared + _mlp_parameters(model, model.ffn, tp) + norm
    elif mlp == "experts":
        shared = shared + norm + (h + model.router.bias) * model.experts + h * model.shared_expert_gate
        if model.shared_expert_ffn:
            shared = shared + _mlp_parameters(model, model.shared_expert_ffn, tp)
        expert = _mlp_parameters(model, model.expert_ffn, table.expert_tensor_parallel.astype(np.float64))
        experts = model.experts / table.expert_parallel * expert
    trains, none = (shared, experts), np.zeros(len(table))
    frozen = none, none
    if model.lora is not None:
        packed = quantised.block_parameters(model, mlp, tp)
        trains, frozen = (block_parameters(model, mlp, tp), none), (shared - packed, experts)
    turned_back = element_bytes(table.precision) * quantised.turned_back_at_once(model, mlp, tp)
    activations = activation_bytes(model, engine, table, mlp)
    return np.stack((*trains, *frozen, *activations, quantised.block_bytes(model, mlp, tp), turned_back))


class _Mtp(NamedTuple):
    """Sizes of all MTP modules, [n] each."""

    parameters: Floats
    """Outside of routed experts."""
    experts: Floats
    activations: Floats
    """Bytes, without those of the loss."""


def _mtp(model: ModelSpec, engine: Engine, table: LayoutTable) -> _Mtp:
    count = model.mtp_depths
    if not count:
        return _Mtp(*(np.zeros(len(table)) for _ in _Mtp._fields))
    kind = model.layer_kind(model.layers - 1)
    shared, experts, _, _, kept = _layer(model.mtp_module, engine, table, kind.mlp)[:5]
    own = joining_parameters(model)
    return _Mtp(count * (shared + own), count * experts, count * (kept + joining_bytes(model, table)))


def unit_sizes(model: ModelSpec, engine: Engine, table: LayoutTable) -> UnitSizes:
    """Sizes of the units of every row.

    The loss keeps the logits, their gradient and `logits_copies` in fp32, next to the input of the
    final norm and of the output matrix (arXiv:2205.05198, section 4.3). One in chunks has those of a chunk,
    and the gradients of the tokens and of the matrix.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp = table.tensor_parallel.astype(np.float64)
    part = np.where(table.sequence_parallel, tp, 1.0)
    h, zero = model.hidden, np.zeros(len(table))
    vocabulary = padded_vocabulary(model, table)
    positions = model.max_positions if model.position == "learned" else 0
    has_matrix = (table.pipeline_parallel > 1) | (not model.tied)
    layers = {
        "dense": model.mean(lambda spec, mlp: _layer(spec, engine, table, mlp), leading=True),
        "moe": np.zeros((LAYER_ROWS, len(table))),
    }
    if model.routed_layers:
        layers["moe"] = model.mean(lambda spec, mlp: _layer(spec, engine, table, mlp), leading=False)
    plain_layers = {"dense": np.zeros((3, len(table))), "moe": np.zeros((3, len(table)))}
    if table.recompute_method.any():
        plain = replace(
            table,
            recompute=np.zeros_like(table.recompute),
            recompute_modules=np.zeros_like(table.recompute_modules),
        )
        for held in plain_layers:
            if held == "dense" or model.routed_layers:
                plain_layers[held] = model.mean(
                    lambda spec, mlp: np.stack(activation_bytes(spec, engine, plain, mlp)),
                    leading=held == "dense",
                )
    dense_layer, _, frozen_dense, _, dense_kept, dense_recomputation, dense_offload = layers["dense"][:7]
    moe_layer, experts, frozen_moe, frozen_experts = layers["moe"][:4]
    moe_kept, moe_recomputation, moe_offload = layers["moe"][4:7]
    ends = (
        (vocabulary * h + model.other_parameters) / tp + positions * h,
        has_matrix * vocabulary * h / tp + model.norm_parameters,
    )
    mtp = _mtp(model, engine, table)
    copy = (table.pipeline_parallel > 1) & (model.mtp_depths > 0 and not model.tied)
    ends = ends[0], ends[1] + mtp.parameters + copy * vocabulary * h / tp
    frozen_ends = zero, zero
    if model.lora is not None:
        ends, frozen_ends = frozen_ends, ends
    dense_plain, dense_plain_working, dense_plain_offload = plain_layers["dense"]
    moe_plain, moe_plain_working, moe_plain_offload = plain_layers["moe"]
    shown = t * vocabulary / (1 if engine.loss.gathers_logits else tp)
    copies: Floats | float = engine.loss.logits_copies
    if engine.loss.split_logits_copies is not None:
        copies = np.where(tp > 1, engine.loss.split_logits_copies, copies)
    logits, waiting = shown * (2 * e + 4 * copies), e * shown
    if engine.loss.chunked and model.lora is not None:
        waiting = 0 * shown
    elif engine.loss.chunked:
        waiting = e * vocabulary * h / tp
    kept_logits = logits
    if engine.loss.chunked:
        # What is not compiled has exponents in fp32 where the compiler reads logits twice.
        copy = np.where(table.runs(*SPLIT_BACKWARD), 4 * (e < 4), e)
        chunks = loss_chunks(t.astype(np.int64), table.tensor_parallel)
        kept_logits = e * t * h + waiting
        logits = shown / chunks * (e + copy) + kept_logits
    waits = e * vocabulary * h / tp if engine.loss.chunked else 0.0
    head_input = e * t * h / (part if engine.activations.regathers_sequence else 1)
    orthogonal = orthogonal_rows(table)
    mode = engine.runs.muon_modes[0] if table.muon_mode == "default" else table.muon_mode
    return UnitSizes(
        dense_layer=dense_layer,
        moe_layer=moe_layer,
        experts=experts,
        embedding=ends[0],
        head=ends[1],
        mtp_experts=mtp.experts,
        mtp_activations=mtp.activations + model.mtp_depths * waits,
        frozen_dense_layer=frozen_dense,
        frozen_moe_layer=frozen_moe,
        frozen_experts=frozen_experts,
        frozen_embedding=frozen_ends[0],
        frozen_head=frozen_ends[1],
        quantised_dense_layer=layers["dense"][7],
        quantised_moe_layer=layers["moe"][7],
        dequantised=np.maximum(layers["dense"][8], layers["moe"][8]),
        dense_activations=dense_kept,
        moe_activations=moe_kept,
        dense_recomputation=dense_recomputation,
        moe_recomputation=moe_recomputation,
        dense_offload=dense_offload,
        moe_offload=moe_offload,
        dense_plain_activations=dense_plain,
        moe_plain_activations=moe_plain,
        dense_plain_recomputation=dense_plain_working,
        moe_plain_recomputation=moe_plain_working,
        dense_plain_offload=dense_plain_offload,
        moe_plain_offload=moe_plain_offload,
        largest_matrix=orthogonal * largest_matrix(model, tp),
        orthogonal_step=orthogonal * (engine.muon.gathered is not None) * orthogonal_bytes(model, mode, tp),
        output_gradients=model.mean(
            lambda spec, _: output_gradient_bytes(spec, table), leading=not model.routed_layers
        ),
        logit_gradients=waiting,
        kept_logits=kept_logits + e * t * h / part + (0.0 if engine.loss.chunked else head_input),
        logits=logits + e * t * h / part + head_input,
        layer_input=e * t * h * (part > 1),
        layer_output=e * t * h / part,
        score_reserve=t
        * model.seq
        * model.heads
        / tp
        * engine.allocator.score_reserve
        * (not engine.attention.flash),
        doubt=zero + model_share(model, engine),
        dispatch_buffers=dispatch_buffer_bytes(model, engine, table),
        layer_tables=zero + 4.0 * model.seq * model.head_dim * engine.allocator.rotary_tables,
    )


def end_parameters(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Parameters of embedding and head that train, on one device of each pipeline rank, [n, k]."""
    return ranks.first * sizes.embedding[:, None] + ranks.last * sizes.head[:, None]


def rank_parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Parameters of each pipeline rank on one device that train, [n, k]: outside of experts, and in them."""
    shared = ranks.all_dense * sizes.dense_layer[:, None] + end_parameters(sizes, ranks)
    if not sizes.experts.any():
        return shared, np.zeros_like(shared)
    experts = ranks.all_moe * sizes.experts[:, None] + ranks.last * sizes.mtp_experts[:, None]
    return shared + ranks.all_moe * sizes.moe_layer[:, None], experts


def frozen_parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Parameters of each pipeline rank on one device that are frozen, as `rank_parameters` has the others."""
    shared = ranks.all_dense * sizes.frozen_dense_layer[:, None]
    shared = shared + ranks.first * sizes.frozen_embedding[:, None] + ranks.last * sizes.frozen_head[:, None]
    experts = ranks.all_moe * sizes.frozen_experts[:, None]
    return shared + ranks.all_moe * sizes.frozen_moe_layer[:, None], experts + np.zeros_like(shared)


def row_unit_sizes(model: ModelSpec, engine: Engine, shapes: LayoutTable, shape: Ints) -> UnitSizes:
    """Parameters and activations of every row; `shape` says which row of `shapes` each is like."""
    every, none = unit_sizes(model, engine, shapes), np.broadcast_to(0.0, shape.shape)
    columns = {field.name: getattr(every, field.name) for field in fields(UnitSizes)}
    return UnitSizes(**{name: held[shape] if held.any() else none for name, held in columns.items()})
