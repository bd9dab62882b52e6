"""Parameters and activations of the units of pipeline ranks: layers, embedding and head on one device."""

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

    Parameters are numbers of trained parameters; activations are bytes of one microbatch.
    """

    dense_layer: Floats
    """Parameters of a layer with a dense MLP."""
    moe_layer: Floats
    """Parameters of a layer with experts, without the routed experts."""
    experts: Floats
    """Parameters of the routed experts of a layer."""
    local_experts: Floats
    """Routed experts of a layer on one device."""
    last_matrices: Floats
    """The part of `experts` in the last matrix of each."""
    embedding: Floats
    head: Floats
    """Parameters of final norm and output matrix; the matrix of a tied head is included for pp > 1 only. MTP
    modules are included, without their routed experts. With pp > 1 and no tied head, MTP modules have their
    own embedding."""
    mtp_experts: Floats
    """Parameters of the routed experts of all MTP modules."""
    mtp_activations: Floats
    """Bytes that MTP modules keep from forward to backward."""
    dense_activations: Floats
    """Bytes kept from forward to backward."""
    moe_activations: Floats
    dense_recomputation: Floats
    """Bytes recomputed in backward, one layer at a time."""
    moe_recomputation: Floats
    dense_offload: Floats
    """Bytes in host memory, except for the layers of the current and the next backward pass."""
    moe_offload: Floats
    dense_plain_activations: Floats
    """Bytes of layers without recomputation while others recompute."""
    moe_plain_activations: Floats
    largest_matrix: Floats
    """Parameters of the largest matrix of a layer, for optimizers that update whole matrices; otherwise 0."""
    orthogonal_step: Floats
    """Bytes of tensors for the update of the largest matrix, if known for the engine; otherwise 0."""
    dense_plain_recomputation: Floats
    """Further bytes in the backward pass of a layer without recomputation, beside its activations."""
    moe_plain_recomputation: Floats
    dense_plain_offload: Floats
    moe_plain_offload: Floats
    output_gradients: Floats
    """Bytes of a layer's output gradients that wait for its weight gradients, when backward is split."""
    logits: Floats
    logit_gradients: Floats
    """Bytes of logit gradients that wait for the gradient of the output matrix, or of that gradient
    itself."""
    kept_logits: Floats
    """Bytes of `logits` kept from forward to backward."""
    layer_input: Floats
    """Bytes of a layer's input, gathered over tensor-parallel ranks that split its sequence; otherwise 0."""
    layer_output: Floats
    """Bytes of a layer's output, which is sent to the next stage."""
    doubt: Floats
    """Half the width of the range of tensor bytes for all layouts of the model, as a share of these bytes."""
    layer_tables: Floats
    """Permanent bytes of each layer besides its model states."""
    dispatch_buffers: Floats
    """Bytes of the buffers for dispatch to experts, outside of the allocator."""
    score_reserve: Floats
    """Bytes of the blocks of one layer's attention scores that the allocator cannot use."""
    frozen_dense_layer: Floats
    """Parameters of a dense layer that are frozen under adapters, without 4-bit ones."""
    frozen_moe_layer: Floats
    frozen_experts: Floats
    frozen_embedding: Floats
    frozen_head: Floats
    quantised_dense_layer: Floats
    """Bytes of the 4-bit frozen matrices of a dense layer."""
    quantised_moe_layer: Floats
    dequantised: Floats
    """Bytes of dequantised matrices that exist at the same time, in the format of GEMMs."""


def _attention_parameters(model: ModelSpec, tp: Floats) -> tuple[Floats, Floats]:
    """Parameters of one attention block of the first layer's kind with its norms: those split over `tp`, and
    those on every rank."""
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
    """Parameters of one MLP split over `degree` ranks; every rank holds the bias of the output."""
    inputs = 1 + model.gated
    split = width * (inputs * (model.hidden + model.linear_bias) + model.hidden)
    return split / degree + model.linear_bias * model.hidden


LAYER_ROWS = 9
"""Number of rows of the result of `_layer`."""


def _layer(model: ModelSpec, engine: Engine, table: LayoutTable, mlp: MlpKind) -> Floats:
    """Sizes of a layer of the first layer's kind of attention: trained parameters outside and inside of
    routed experts, the same for frozen parameters, bytes kept, recomputed and offloaded, and bytes of 4-bit
    matrices and of dequantised matrices; [`LAYER_ROWS`, n]."""
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
    """Number of parameters outside of routed experts."""
    experts: Floats
    activations: Floats
    """Bytes of activations, without those of the loss."""


def _mtp(model: ModelSpec, engine: Engine, table: LayoutTable) -> _Mtp:
    count = model.mtp_depths
    if not count:
        return _Mtp(*(np.zeros(len(table)) for _ in _Mtp._fields))
    kind = model.layer_kind(model.layers - 1)
    shared, experts, _, _, kept = _layer(model.mtp_module, engine, table, kind.mlp)[:5]
    own = joining_parameters(model)
    return _Mtp(count * (shared + own), count * experts, count * (kept + joining_bytes(model, table)))


def _kinds_of_layers(model: ModelSpec, engine: Engine, table: LayoutTable) -> tuple[Floats, Floats]:
    """Results of `_layer` for the mean layer with a dense MLP, and for the mean layer with experts."""
    dense = model.mean(lambda spec, mlp: _layer(spec, engine, table, mlp), leading=True)
    if not model.routed_layers:
        return dense, np.zeros((LAYER_ROWS, len(table)))
    return dense, model.mean(lambda spec, mlp: _layer(spec, engine, table, mlp), leading=False)


def _plain_layers(model: ModelSpec, engine: Engine, table: LayoutTable) -> tuple[Floats, Floats]:
    """Bytes kept, recomputed and offloaded of layers without recomputation while others recompute, [3, n].

    The first result is for the mean layer with a dense MLP, the second for the mean layer with experts.
    """
    dense = moe = np.zeros((3, len(table)))
    if not table.recompute_method.any():
        return dense, moe
    none, no_modules = np.zeros_like(table.recompute), np.zeros_like(table.recompute_modules)
    plain = replace(table, recompute=none, recompute_modules=no_modules)

    def kept(spec: ModelSpec, mlp: MlpKind) -> Floats:
        return np.stack(activation_bytes(spec, engine, plain, mlp))

    dense = model.mean(kept, leading=True)
    return dense, model.mean(kept, leading=False) if model.routed_layers else moe


def _end_parameters(model: ModelSpec, table: LayoutTable, mtp: _Mtp) -> tuple[Floats, Floats]:
    """Parameters of the embedding, and of the final norm, output matrix and MTP modules, on one device."""
    tp, h = table.tensor_parallel.astype(np.float64), model.hidden
    vocabulary, split = padded_vocabulary(model, table), table.pipeline_parallel > 1
    positions = model.max_positions if model.position == "learned" else 0
    has_matrix, copy = split | (not model.tied), split & (model.mtp_depths > 0 and not model.tied)
    embedding = (vocabulary * h + model.other_parameters) / tp + positions * h
    head = has_matrix * vocabulary * h / tp + model.norm_parameters
    return embedding, head + mtp.parameters + copy * vocabulary * h / tp


class _Loss(NamedTuple):
    """Bytes of the loss of one microbatch, [n] each."""

    logits: Floats
    """Bytes of logits, their copies and gradients while the loss is computed."""
    kept: Floats
    """Bytes of `logits` kept from forward to backward."""
    gradients: Floats
    """Bytes of logit gradients that wait for the gradient of the output matrix, or of the latter gradient
    itself.
    """
    of_each_depth: Floats
    """Bytes of output-matrix gradients that the loss of an MTP module holds."""


def _loss(model: ModelSpec, engine: Engine, table: LayoutTable) -> _Loss:
    """Bytes of the loss.

    The loss keeps the logits, their gradient and `logits_copies` in fp32 (arXiv:2205.05198, section 4.3). A
    chunked loss has those of one chunk, and the gradients of the tokens and of the output matrix.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp, h = table.tensor_parallel.astype(np.float64), model.hidden
    vocabulary = padded_vocabulary(model, table)
    shown = t * vocabulary / (1 if engine.loss.gathers_logits else tp)
    if not engine.loss.chunked:
        copies: Floats | float = engine.loss.logits_copies
        if engine.loss.split_logits_copies is not None:
            copies = np.where(tp > 1, engine.loss.split_logits_copies, copies)
        logits = shown * (2 * e + 4 * copies)
        return _Loss(logits, logits, e * shown, 0 * shown)
    matrix = e * vocabulary * h / tp
    waiting = 0 * shown if model.lora is not None else matrix
    # Without compilation the exponents are in fp32; the compiler reads logits twice instead.
    copy = np.where(table.runs(*SPLIT_BACKWARD), 4 * (e < 4), e)
    chunks = loss_chunks(t.astype(np.int64), table.tensor_parallel)
    kept = e * t * h + waiting
    return _Loss(shown / chunks * (e + copy) + kept, kept, waiting, matrix)


def unit_sizes(model: ModelSpec, engine: Engine, table: LayoutTable) -> UnitSizes:
    """Sizes of the units of every row.

    The head holds the input of the final norm and of the output matrix next to the logits
    (arXiv:2205.05198, section 4.3).
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp = table.tensor_parallel.astype(np.float64)
    part = np.where(table.sequence_parallel, tp, 1.0)
    h, zero = model.hidden, np.zeros(len(table))
    dense, moe = _kinds_of_layers(model, engine, table)
    plain_dense, plain_moe = _plain_layers(model, engine, table)
    mtp = _mtp(model, engine, table)
    ends, frozen_ends = _end_parameters(model, table, mtp), (zero, zero)
    if model.lora is not None:
        ends, frozen_ends = frozen_ends, ends
    loss = _loss(model, engine, table)
    layer_output = e * t * h / part
    head_input = e * t * h / (part if engine.activations.regathers_sequence else 1)
    scores = t * model.seq * model.heads / tp * (not engine.attention.flash)
    orthogonal = orthogonal_rows(table)
    mode = engine.runs.muon_modes[0] if table.muon_mode == "default" else table.muon_mode
    return UnitSizes(
        dense_layer=dense[0],
        moe_layer=moe[0],
        experts=moe[1],
        local_experts=model.experts / table.expert_parallel,
        last_matrices=moe[1] / (2 + model.gated),
        embedding=ends[0],
        head=ends[1],
        mtp_experts=mtp.experts,
        mtp_activations=mtp.activations + model.mtp_depths * loss.of_each_depth,
        frozen_dense_layer=dense[2],
        frozen_moe_layer=moe[2],
        frozen_experts=moe[3],
        frozen_embedding=frozen_ends[0],
        frozen_head=frozen_ends[1],
        quantised_dense_layer=dense[7],
        quantised_moe_layer=moe[7],
        dequantised=np.maximum(dense[8], moe[8]),
        dense_activations=dense[4],
        moe_activations=moe[4],
        dense_recomputation=dense[5],
        moe_recomputation=moe[5],
        dense_offload=dense[6],
        moe_offload=moe[6],
        dense_plain_activations=plain_dense[0],
        moe_plain_activations=plain_moe[0],
        dense_plain_recomputation=plain_dense[1],
        moe_plain_recomputation=plain_moe[1],
        dense_plain_offload=plain_dense[2],
        moe_plain_offload=plain_moe[2],
        largest_matrix=orthogonal * largest_matrix(model, tp),
        orthogonal_step=orthogonal * (engine.muon.gathered is not None) * orthogonal_bytes(model, mode, tp),
        output_gradients=model.mean(
            lambda spec, _: output_gradient_bytes(spec, table), leading=not model.routed_layers
        ),
        logit_gradients=loss.gradients,
        kept_logits=loss.kept + layer_output + (0.0 if engine.loss.chunked else head_input),
        logits=loss.logits + layer_output + head_input,
        layer_input=e * t * h * (part > 1),
        layer_output=layer_output,
        score_reserve=scores * engine.allocator.score_reserve,
        doubt=zero + model_share(model, engine),
        dispatch_buffers=dispatch_buffer_bytes(model, engine, table),
        layer_tables=zero + 4.0 * model.seq * model.head_dim * engine.allocator.rotary_tables,
    )


def end_parameters(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Trained parameters of embedding and head, on one device of each pipeline rank, [n, k]."""
    return ranks.first * sizes.embedding[:, None] + ranks.last * sizes.head[:, None]


def rank_parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Trained parameters of each pipeline rank on one device, [n, k]: outside of experts, and in experts."""
    shared = ranks.all_dense * sizes.dense_layer[:, None] + end_parameters(sizes, ranks)
    if not sizes.experts.any():
        return shared, np.zeros_like(shared)
    experts = ranks.all_moe * sizes.experts[:, None] + ranks.last * sizes.mtp_experts[:, None]
    return shared + ranks.all_moe * sizes.moe_layer[:, None], experts


def frozen_parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Frozen parameters of each pipeline rank on one device, in the form of `rank_parameters`."""
    shared = ranks.all_dense * sizes.frozen_dense_layer[:, None]
    shared = shared + ranks.first * sizes.frozen_embedding[:, None] + ranks.last * sizes.frozen_head[:, None]
    experts = ranks.all_moe * sizes.frozen_experts[:, None]
    return shared + ranks.all_moe * sizes.frozen_moe_layer[:, None], experts + np.zeros_like(shared)


def row_unit_sizes(model: ModelSpec, engine: Engine, shapes: LayoutTable, shape: Ints) -> UnitSizes:
    """Parameters and activations of every row; `shape` is the index of each row's equal in `shapes`."""
    every, none = unit_sizes(model, engine, shapes), np.broadcast_to(0.0, shape.shape)
    columns = {field.name: getattr(every, field.name) for field in fields(UnitSizes)}
    return UnitSizes(**{name: held[shape] if held.any() else none for name, held in columns.items()})
