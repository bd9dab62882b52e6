"""Bytes on one device of each pipeline rank at the peak of the step.

Model states follow ZeRO (Rajbhandari et al., arXiv:1910.02054, section 3), activations Korthikanti
et al. (arXiv:2205.05198, sections 4 and 5), counted tensor by tensor so that grouped queries, gated
MLPs, flash attention, experts and 32-bit activations come out of the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.engine import Engine, MemoryPolicy
from costmodels.errors import InputError
from costmodels.hardware import Cluster
from costmodels.model_spec import ModelSpec
from costmodels.operators import (
    attention_widths,
    element_bytes,
    expert_replicas,
    expert_tensor_parallel,
    key_value_width,
    padded_vocabulary,
    routed_rows,
    tokens,
)
from costmodels.pipeline import Ranks, in_flight
from costmodels.table import Bools, Floats, LayoutTable

GATHERED_LAYERS = 2
"""Whole layers that ZeRO 3 holds at a time: the one at work and the next one, prefetched."""


@dataclass(frozen=True)
class UnitSizes:
    """What one layer, embedding or head takes on one device; arrays of shape [n].

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
    """Kept from forward to backward."""
    moe_activations: Floats
    dense_working: Floats
    """Recomputed in backward, one layer at a time."""
    moe_working: Floats
    logits: Floats


def memory_policy(engine: Engine, precision: str) -> MemoryPolicy:
    """Bytes per parameter of an engine in one precision (tf32 stores fp32).

    Raises:
        InputError: the engine does not train in that precision.
    """
    name = "fp32" if precision == "tf32" else precision
    if name not in engine.memory:
        raise InputError(
            f"precision {precision}: engine {engine.name} does not train in it; "
            f"use {', '.join(engine.memory)}"
        )
    return engine.memory[name]


def _attention_parameters(model: ModelSpec, tp: Floats) -> tuple[Floats, Floats]:
    """Parameters of one attention block and its norm: split over `tp`, and held by every rank."""
    h, norm = model.hidden, model.norm_parameters
    mla = model.latent_attention
    if mla is not None:
        queries, values = attention_widths(model)
        down = h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) + values * h
        up += (mla.q_lora_rank or h) * queries
        down += mla.q_lora_rank * (h + 1)
        return up / tp, norm + down + 0 * tp
    bias = model.linear_bias or model.qkv_bias
    kv = 2 * np.maximum(model.kv_heads / tp, 1.0) * model.head_dim
    split = (model.q_size / tp + kv) * (h + bias) + model.q_size * h / tp
    return split, norm + model.linear_bias * h + 2 * model.head_dim * model.qk_norm + 0 * tp


def _mlp_parameters(model: ModelSpec, width: int, degree: Floats) -> Floats:
    """Parameters of one MLP split over `degree` ranks; all hold the bias of its output."""
    inputs = 1 + model.gated
    split = width * (inputs * (model.hidden + model.linear_bias) + model.hidden)
    return split / degree + model.linear_bias * model.hidden


def _layer_activations(
    model: ModelSpec, engine: Engine, table: LayoutTable, moe: bool
) -> tuple[Floats, Floats]:
    """Bytes of one layer and micro batch: kept for backward, and recomputed there.

    For a GPT layer of 16-bit activations with dropout this is s b h (10 + 24/t + 5 a s / (h t)), with
    sequence parallelism s b h / t (34 + 5 a s / h) (arXiv:2205.05198, equations 2 and 4); selective
    recomputation drops the scores (equation 6), full recomputation keeps the input of the layer only.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp, sp, h = table.tensor_parallel, table.sequence_parallel, model.hidden
    part = np.where(sp, tp, 1)
    queries, values = attention_widths(model)
    inner = e * (2 + model.gated * (1 if engine.fused_activation else 2))
    residual = t * h / part
    norms = 2 * e * residual + 2 * engine.dropout * residual
    layer_inputs = 2 * e * t * h / (part if engine.regathers_sequence else 1)
    attention = e * t * ((queries + values) / tp + key_value_width(model, table))
    if model.latent_attention is not None:
        mla = model.latent_attention
        attention = attention + e * t * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim) / part
    if engine.flash_attention:
        core = 4 * t * model.heads / tp
    else:
        core = t * model.seq * model.heads / tp * (e + engine.dropout * (e + 1))
    if moe:
        rows = routed_rows(model, table)
        mlp = rows * (inner * model.expert_ffn / expert_tensor_parallel(table) + 2 * e * h)
        mlp = mlp + inner * t * model.shared_expert_ffn / tp + 4 * t * model.experts / part
    else:
        mlp = inner * t * model.ffn / tp
    whole = norms + layer_inputs + attention + core + mlp
    kept = np.choose(table.recompute, [whole, whole - core, e * residual])
    return kept, whole - kept


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
    dense_kept, dense_working = _layer_activations(model, engine, table, moe=False)
    moe_layer = experts = moe_kept = moe_working = zero
    if model.experts:
        moe_layer = attention + model.norm_parameters + h * model.experts
        if model.shared_expert_ffn:
            moe_layer = moe_layer + _mlp_parameters(model, model.shared_expert_ffn, tp)
        expert = _mlp_parameters(model, model.expert_ffn, expert_tensor_parallel(table))
        experts = model.experts / table.expert_parallel * expert
        moe_kept, moe_working = _layer_activations(model, engine, table, moe=True)
    logits = t * vocabulary / tp * (2 * e + 4 * engine.logits_copies)
    head_input = e * t * h / (part if engine.regathers_sequence else 1)
    return UnitSizes(
        dense_layer=attention + mlp,
        moe_layer=moe_layer,
        experts=experts,
        embedding=vocabulary * h / tp + positions * h,
        head=has_matrix * vocabulary * h / tp + model.norm_parameters,
        dense_activations=dense_kept,
        moe_activations=moe_kept,
        dense_working=dense_working,
        moe_working=moe_working,
        logits=logits + e * t * h / part + head_input,
    )


def parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Parameters of each pipeline rank on one device, [n, k]: all but routed experts, and routed experts."""
    shared = ranks.dense * sizes.dense_layer[:, None] + ranks.first * sizes.embedding[:, None]
    shared += ranks.last * sizes.head[:, None]
    if not sizes.experts.any():
        return shared, np.zeros_like(shared)
    return shared + ranks.moe * sizes.moe_layer[:, None], ranks.moe * sizes.experts[:, None]


def shards_gradients(engine: Engine, table: LayoutTable) -> Bools:
    """Rows that reduce gradients before they accumulate, and so keep a shard of them only.

    A pipeline interleaves backward passes of micro batches, so it reduces after the last one.
    """
    eager = (table.zero_stage >= engine.eager_reduction_stage) & (table.pipeline_parallel == 1)
    result: Bools = (table.zero_stage >= 2) & (eager | (table.micro_batches == 1))
    return result


def _states(engine: Engine, table: LayoutTable, replicas: Floats) -> tuple[Floats, Floats, Floats]:
    """Bytes per parameter of parameters, gradients and optimizer state that `replicas` ranks share."""
    policy = memory_policy(engine, table.precision)
    stage = table.zero_stage
    copy = np.where((stage < 3) & (replicas > 1), policy.shard, 0.0)
    copy = copy / np.where(stage >= 1, replicas, 1.0)
    return (
        policy.parameters / np.where(stage == 3, replicas, 1.0) + copy,
        policy.gradients / np.where(shards_gradients(engine, table), replicas, 1.0),
        policy.optimizer / np.where(stage >= 1, replicas, 1.0),
    )


def stage_memory(
    cluster: Cluster, engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks
) -> dict[str, Floats]:
    """Bytes on a device of each pipeline rank at the peak: the fields of `StageMemory`, each [n, k]."""
    shared, experts = parameters(sizes, ranks)
    replicas = (table.data_parallel * table.context_parallel).astype(np.float64)
    states = [per[:, None] * shared for per in _states(engine, table, replicas)]
    has_experts = bool(sizes.experts.any())
    if has_experts:
        for state, per in zip(states, _states(engine, table, expert_replicas(table)), strict=True):
            state += per[:, None] * experts
    gathered = GATHERED_LAYERS * (table.zero_stage == 3) * memory_policy(engine, table.precision).gathered
    layer = np.maximum(sizes.dense_layer, sizes.moe_layer + sizes.experts)
    held = np.minimum(ranks.layers, 1.0) * (gathered * layer)[:, None]

    dense, moe = in_flight(ranks, table.micro_batches[:, None].astype(np.float64))
    activations = dense * sizes.dense_activations[:, None]
    working = np.minimum(ranks.dense, 1.0) * sizes.dense_working[:, None]
    if has_experts:
        activations += moe * sizes.moe_activations[:, None]
        working = np.maximum(working, np.minimum(ranks.moe, 1.0) * sizes.moe_working[:, None])
    activations += working
    logits = ranks.last * sizes.logits[:, None]
    groups = (
        (table.tensor_parallel > 1) * 1.0
        + (table.context_parallel > 1)
        + (table.expert_parallel > 1)
        + (table.pipeline_parallel > 1)
        + (replicas > 1)
    )
    fixed = cluster.device.context_bytes + groups * engine.communicator_bytes
    return {
        "parameters": states[0] + held,
        "gradients": states[1],
        "optimizer": states[2],
        "activations": activations,
        "logits": logits,
        "overhead": fixed[:, None] + engine.fragmentation * (activations + logits),
    }
