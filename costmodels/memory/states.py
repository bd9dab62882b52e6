"""Bytes on one device of each pipeline rank at the peak of the step.

Model states follow ZeRO (Rajbhandari et al., arXiv:1910.02054, section 3); activations are those of
`costmodels.memory.activations`, times what the schedule has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodels.errors import InputError
from costmodels.layers.operators import padded_vocabulary
from costmodels.layers.optimizer import ADAM_STATE, end_state, layer_state
from costmodels.layers.shapes import attention_widths, element_bytes, tokens
from costmodels.memory.activations import layer_activations, waiting_activations
from costmodels.memory.peak import at_fuller_moment, dynamic, held_outputs, margin, stepping
from costmodels.ranks.pipeline import NONE, Ranks, in_flight
from costmodels.spec.engine import Engine, MemoryPolicy
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import RECOMPUTE_KINDS, RECOMPUTE_METHODS, Bools, Floats, Ints, LayoutTable

FULL = RECOMPUTE_KINDS.index("full")
UNIFORM = RECOMPUTE_METHODS.index("uniform")

NARROW, MASTER = 2.0, 4.0
"""Bytes of a gradient in 16 bits, and of a gradient or a parameter as the optimizer sees it."""

FETCHED_LAYERS = 2
"""Layers whose offloaded activations are on the device: the one in backward and the next one, on its way."""

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
    dense_moved: Floats
    """Kept in host memory, but for those layers that backward uses or is about to."""
    moe_moved: Floats
    dense_plain_activations: Floats
    """Kept by layers that recompute nothing while others do."""
    moe_plain_activations: Floats
    dense_plain_moved: Floats
    moe_plain_moved: Floats
    waiting: Floats
    """Gradients of a layer's activations that wait for those of its weights, when backward is split."""
    logits: Floats
    logits_waiting: Floats
    """The same of the output matrix."""
    layer_input: Floats
    """The input of a layer, gathered over tensor-parallel ranks that split its sequence; otherwise 0."""
    layer_tables: Floats
    """Kept for good by each layer besides its states."""
    score_reserve: Floats
    """What the allocator cannot use of the blocks of one layer's attention scores."""


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
    dense_kept, dense_working, dense_moved = layer_activations(model, engine, table, moe=False)
    moe_layer = experts = moe_kept = moe_working = moe_moved = zero
    if model.experts:
        moe_layer = attention + model.norm_parameters + h * (model.experts + model.shared_expert_gate)
        if model.shared_expert_ffn:
            moe_layer = moe_layer + _mlp_parameters(model, model.shared_expert_ffn, tp)
        expert = _mlp_parameters(model, model.expert_ffn, table.expert_tensor_parallel.astype(np.float64))
        experts = model.experts / table.expert_parallel * expert
        moe_kept, moe_working, moe_moved = layer_activations(model, engine, table, moe=True)
    dense_plain = moe_plain = dense_plain_moved = moe_plain_moved = zero
    if table.recompute_method.any():
        plain = replace(
            table,
            recompute=np.zeros_like(table.recompute),
            recompute_modules=np.zeros_like(table.recompute_modules),
        )
        dense_plain, _, dense_plain_moved = layer_activations(model, engine, plain, moe=False)
        if model.experts:
            moe_plain, _, moe_plain_moved = layer_activations(model, engine, plain, moe=True)
    shown = t * vocabulary / (1 if engine.gathers_logits else tp)
    copies: Floats | float = engine.logits_copies
    if engine.split_logits_copies is not None:
        copies = np.where(tp > 1, engine.split_logits_copies, copies)
    logits = shown * (2 * e + 4 * copies)
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
        dense_moved=dense_moved,
        moe_moved=moe_moved,
        dense_plain_activations=dense_plain,
        moe_plain_activations=moe_plain,
        dense_plain_moved=dense_plain_moved,
        moe_plain_moved=moe_plain_moved,
        waiting=waiting_activations(model, table),
        logits_waiting=e * shown,
        logits=logits + e * t * h / part + head_input,
        layer_input=e * t * h * (part > 1),
        score_reserve=t * model.seq * model.heads / tp * engine.score_reserve * (not engine.flash_attention),
        layer_tables=zero + 4.0 * model.seq * model.head_dim * engine.rotary_tables,
    )


def end_parameters(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Parameters of embedding and head on one device of each pipeline rank, [n, k]."""
    return ranks.first * sizes.embedding[:, None] + ranks.last * sizes.head[:, None]


def parameters(sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Parameters of each pipeline rank on one device, [n, k]: all but routed experts, and routed experts."""
    shared = ranks.all_dense * sizes.dense_layer[:, None] + end_parameters(sizes, ranks)
    if not sizes.experts.any():
        return shared, np.zeros_like(shared)
    return shared + ranks.all_moe * sizes.moe_layer[:, None], ranks.all_moe * sizes.experts[:, None]


def shards_gradients(engine: Engine, table: LayoutTable) -> Bools:
    """Rows that reduce gradients before they accumulate, and so keep a shard of them only.

    A pipeline interleaves backward passes of micro batches, so it reduces after the last one. With one micro
    batch nothing accumulates: FSDP2, for which ZeRO 1 and 2 are the same, frees what it has reduced.
    """
    eager = (table.zero_stage >= engine.eager_reduction_stage) & (table.pipeline_parallel == 1)
    single = (table.micro_batches == 1) & (table.zero_stage >= (1 if engine.fully_sharded else 2))
    result: Bools = (table.zero_stage >= 2) & eager | single
    return result


def wraps_parameters(table: LayoutTable, has_experts: bool) -> Bools:
    """Rows whose parameters FSDP2 manages: all but those of fp32 that no other rank holds.

    The runtime wraps all of a stage or nothing of it, and tensor-parallel ranks may hold the same experts.
    """
    apart = table.precision not in ("fp32", "tf32")
    result: Bools = (table.replicas > 1) | table.offload_optimizer | apart
    return result | (table.expert_replicas > 1) if has_experts else result


def frees_parameters(table: LayoutTable) -> Bools:
    """Rows that keep a shard of the parameters only, and gather a layer at a time.

    A pipeline keeps what a backward pass has gathered for the forward pass that follows.
    """
    result: Bools = (table.zero_stage == 3) & (table.pipeline_parallel == 1)
    return result


def reduced_bytes(engine: Engine, table: LayoutTable) -> float:
    """Bytes of one gradient element on the wire of a reduction."""
    reduced = memory_policy(engine, table.precision).reduced
    return min(reduced, 2.0) if table.gradient_reduction == "bf16" else reduced


def _states(
    engine: Engine, table: LayoutTable, replicas: Ints, shards: Ints, has_experts: bool
) -> tuple[Floats, Floats, Floats]:
    """Bytes per parameter of parameters, gradients and optimizer state.

    `replicas` ranks hold the same parameters, and ZeRO splits over `shards` of them (1 without ZeRO). FSDP2
    computes with copies of its fp32 shards (which the bytes of parameters, or of a 16-bit optimizer, count),
    also of those of one rank, and frees all of them after use in ZeRO 3. Of an offloaded optimizer it keeps
    all fp32 shards and sharded gradients in host memory.

    Gradients that are reduced in bf16 add up in bf16, and the optimizer gets an fp32 copy of its shard. FSDP2
    makes that copy of a layer as it frees the sum, so that one follows the other; elsewhere both are there.
    """
    policy = memory_policy(engine, table.precision)
    frees, wraps = frees_parameters(table), wraps_parameters(table, has_experts)
    on_host = table.offload_optimizer & engine.fully_sharded
    copies = wraps if engine.fully_sharded else replicas > 1
    copy = np.where(~frees & copies & ~on_host, policy.shard, 0.0) / shards
    master = engine.fully_sharded and policy.optimizer > ADAM_STATE
    permanent = 0.0 if master else np.where(on_host, 0.0, policy.parameters / shards)
    parameters = np.where(frees, permanent, policy.parameters)
    whole: Floats | float = policy.gradients
    if policy.gradients_alone is not None:
        whole = np.where(replicas > 1, policy.gradients, policy.gradients_alone)
    if table.gradient_reduction == "bf16" and policy.gradients > NARROW:
        wide = np.where(on_host, 0.0, MASTER / shards)
        summed = np.maximum(NARROW, wide) if engine.fully_sharded else NARROW + wide
        whole = np.where(wraps, summed, whole) if engine.fully_sharded else summed
    sharded = np.where(on_host, 0.0, policy.gradients / shards)
    state = policy.optimizer - ADAM_STATE + layer_state(table)
    return (
        parameters + copy,
        np.where(shards_gradients(engine, table), sharded, whole),
        np.where(table.offload_optimizer, 0.0, state / shards),
    )


def model_states(
    engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks, held: tuple[Floats, Floats]
) -> list[Floats]:
    """Bytes of parameters, gradients and optimizer state of each pipeline rank, [n, k] each.

    Args:
        held: counts of parameters, as `parameters` has them.
    """
    shared, experts = held
    has_experts = bool(sizes.experts.any())
    each = _states(engine, table, table.replicas, table.zero_shards, has_experts)
    states = [per[:, None] * shared for per in each]
    if has_experts:
        every = _states(engine, table, table.expert_replicas, table.expert_shards, has_experts)
        for state, per in zip(states, every, strict=True):
            state += per[:, None] * experts
    more = end_state(table) - layer_state(table)
    if more.any():
        ends = end_parameters(sizes, ranks)
        states[2] = states[2] + (~table.offload_optimizer * more / table.zero_shards)[:, None] * ends
    return states


def permanent(engine: Engine, sizes: UnitSizes, ranks: Ranks) -> dict[str, Floats]:
    """Bytes that stay for good besides states, by the part of the peak that counts them.

    The arrays broadcast to [n, k].
    """
    held = {}
    if engine.sequence_buffers:
        held["communication"] = engine.sequence_buffers * sizes.layer_input[:, None]
    if engine.workspace_bytes or engine.rotary_tables:
        held["temporaries"] = engine.workspace_bytes + ranks.layers * sizes.layer_tables[:, None]
    return held


def step_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of tensors while the optimizer steps, [n, k]: the peak once backward has ended."""
    held = parameters(sizes, ranks)
    states = model_states(engine, table, sizes, ranks, held)
    step = stepping(memory_policy(engine, table.precision), table, *held)
    return sum((*states, *permanent(engine, sizes, ranks).values()), step)


def stage_memory(
    cluster: Cluster, engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks
) -> dict[str, Floats]:
    """Bytes on a device of each pipeline rank at the peak: the fields of `StageMemory`.

    Arrays of shape [n, k], or such that broadcast to it (`costmodels.memory.peak.total` and `on_rank`).
    """
    held_parameters = parameters(sizes, ranks)
    states = model_states(engine, table, sizes, ranks, held_parameters)
    ends, has_experts = end_parameters(sizes, ranks), bool(sizes.experts.any())
    # Embedding and head are gathered together, and stay for the backward pass that begins with them. Experts
    # that no other rank holds need no gathering, but FSDP2 copies them too.
    copied = engine.fully_sharded | (table.expert_replicas > 1)
    layer = np.maximum(sizes.dense_layer, sizes.moe_layer + sizes.experts * copied)
    held = GATHERED_LAYERS * layer[:, None] * (ranks.layers > 0)
    gathered = frees_parameters(table) * memory_policy(engine, table.precision).gathered
    held = (held + ends) * gathered[:, None]

    working = np.minimum(ranks.all_dense, 1.0) * sizes.dense_working[:, None]
    if has_experts:
        working = np.maximum(working, np.minimum(ranks.all_moe, 1.0) * sizes.moe_working[:, None])
    if table.recompute_num_layers.max(initial=1) > 1:
        # Uniform recomputation repeats several layers from one input, and holds all of them.
        several = (table.recompute == FULL) & (table.recompute_method == UNIFORM)
        layers = np.where(several, table.recompute_num_layers, 1)[:, None]
        inner = np.maximum(sizes.dense_activations, sizes.moe_activations)[:, None]
        layers = np.clip(layers, 1.0, np.maximum(ranks.layers, 1.0))
        working = layers * working + (layers - 1) * inner
    activations, fetched = NONE if engine.loss_apart else working, np.zeros(())
    flying = in_flight(ranks, table.micro_batches[:, None].astype(np.float64))
    for kind, layers in flying.items():
        activations = activations + layers * getattr(sizes, f"{kind}_activations")[:, None]
        if (moved := getattr(sizes, f"{kind}_moved")).any():
            fetched = np.maximum(fetched, np.minimum(layers, FETCHED_LAYERS) * moved[:, None])
    activations = activations + fetched
    logits = ranks.last * sizes.logits[:, None]
    if ranks.waiting.any():
        activations += (
            np.minimum(ranks.waiting, table.micro_batches[:, None] * ranks.layers) * (sizes.waiting[:, None])
        )
        # The last stage is on the last rank, which runs as many gradients of inputs ahead as there are
        # ranks; in a V it is on the first rank, and runs one ahead.
        ahead = np.where(table.runs("interleaved_zb"), table.pipeline_parallel, 1)
        ahead = np.where(table.runs(*SPLIT_BACKWARD), ahead, 0)
        logits += ranks.last * (ahead * sizes.logits_waiting)[:, None]
    if engine.loss_apart:
        # The gradient of the logits is freed before the first layer is recomputed.
        loss = logits >= working
        activations, logits = activations + np.where(loss, 0.0, working), np.where(loss, logits, 0.0)
    parts = {
        "parameters": states[0] + held,
        "gradients": states[1],
        "optimizer": states[2],
        "activations": activations,
        "logits": logits,
        "communication": held_outputs(engine, sizes.layer_input, ranks, flying),
        "temporaries": NONE,
    }
    policy = memory_policy(engine, table.precision)
    if policy.stepping_whole:
        at_fuller_moment(parts, stepping(policy, table, *held_parameters))
    lost = engine.fragmentation * dynamic(parts)
    if engine.score_reserve:
        lost = lost + sizes.score_reserve[:, None] * (ranks.layers > 0)
    for name, bytes_ in permanent(engine, sizes, ranks).items():
        parts[name] = parts[name] + bytes_
    return parts | margin(cluster, engine, table, lost, has_experts)
