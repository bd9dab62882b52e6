"""Bytes of parameters, gradients and optimizer state, as ZeRO splits them (Rajbhandari et al.,
arXiv:1910.02054, section 3).
"""

from __future__ import annotations

import numpy as np

from costmodels.layers.optimizer import ADAM_STATE, end_state, layer_state
from costmodels.memory.unit_sizes import UnitSizes, end_parameters
from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.abilities import ZERO_STAGES
from costmodels.spec.engine import Engine
from costmodels.spec.table import OPTIMIZERS, Bools, Floats, Ints, LayoutTable

ADAM = OPTIMIZERS.index("adam")

NARROW, MASTER = 2.0, 4.0
"""Bytes of a 16-bit gradient, and of a gradient or a parameter in the optimizer's format."""


def sharded_gradient_rows(engine: Engine, table: LayoutTable) -> Bools:
    """Rows that reduce gradients before accumulating them, and so keep only a shard.

    A pipeline interleaves backward passes of microbatches, so it reduces after the last one. With one
    microbatch nothing accumulates. FSDP2 and MindSpore's graphs then free reduced gradients, so ZeRO 1 and 2
    are the same.
    """
    eager = (table.zero_stage >= engine.sharding.eager_reduction_stage) & (table.pipeline_parallel == 1)
    least = 1 if engine.sharding.fully_sharded else engine.sharding.single_reduction_stage
    single = (table.micro_batches == 1) & (table.zero_stage >= least)
    result: Bools = (table.zero_stage >= 2) & eager | single
    return result


def copied_rows(table: LayoutTable) -> Bools:
    """Rows that compute with copies of their parameters: all except unsharded fp32 parameters."""
    apart = table.precision not in ("fp32", "tf32")
    result: Bools = (table.zero_stage > 0) | table.offload_optimizer | apart
    return result


def sharded_parameter_rows(table: LayoutTable) -> Bools:
    """Rows that keep only a shard of the parameters, and gather a layer at a time.

    In a pipeline, parameters gathered in a backward pass are kept for the next forward pass.
    """
    result: Bools = (table.zero_stage == 3) & (table.pipeline_parallel == 1)
    return result


def narrow_rows(engine: Engine, table: LayoutTable) -> Bools:
    """Rows whose weights, gradients and moments are all in 16 bits."""
    narrow = np.array([stage in engine.sharding.narrow_stages for stage in ZERO_STAGES])
    result: Bools = narrow[table.zero_stage]
    return result


def secondary_share(engine: Engine, table: LayoutTable, replicas: Ints) -> Floats:
    """Share of the parameters that a rank has of ZeRO 3's second copy, [n]; 0 without one."""
    ranks = np.minimum(max(engine.sharding.secondary_shards, 1), replicas)
    exists = sharded_parameter_rows(table) & (engine.sharding.secondary_shards > 0)
    result: Floats = exists / ranks
    return result


def reduction_element_bytes(engine: Engine, table: LayoutTable) -> float:
    """Bytes of one gradient element on the wire of a reduction."""
    reduced = engine.memory_policy(table.precision).reduced
    return min(reduced, 2.0) if table.gradient_reduction == "bf16" else reduced


def _states(
    engine: Engine, table: LayoutTable, replicas: Ints, shards: Ints
) -> tuple[Floats, Floats, Floats]:
    """Bytes per parameter of parameters, gradients and optimizer state.

    `replicas` ranks hold the same parameters, and ZeRO splits over `shards` of them (1 without ZeRO). FSDP2
    computes with copies of its fp32 shards, even on a single rank, and frees all copies after use in ZeRO 3.

    The bytes of parameters, or of a 16-bit optimizer, include these shards. With an offloaded optimizer it
    keeps all fp32 shards and sharded gradients in host memory. Gradients that are reduced in bf16 are summed
    in bf16, and the optimizer gets an fp32 copy of its shard. FSDP2 makes a layer's copy as it frees the sum,
    so they do not exist together; in other engines they do.
    """
    policy = engine.memory_policy(table.precision)
    frees, copied = sharded_parameter_rows(table), copied_rows(table)
    on_host = table.offload_optimizer & engine.sharding.fully_sharded
    copies = copied if engine.sharding.fully_sharded else replicas > 1
    copy = np.where(~frees & copies & ~on_host, policy.shard, 0.0) / shards
    master = engine.sharding.fully_sharded and policy.optimizer > ADAM_STATE
    permanent = 0.0 if master else np.where(on_host, 0.0, policy.parameters / shards)
    parameters = np.where(frees, permanent, policy.parameters)
    whole: Floats | float = policy.gradients
    if policy.gradients_alone is not None:
        whole = np.where(replicas > 1, policy.gradients, policy.gradients_alone)
    if table.gradient_reduction == "bf16" and policy.gradients > NARROW:
        wide = np.where(on_host, 0.0, MASTER / shards)
        summed = np.maximum(NARROW, wide) if engine.sharding.fully_sharded else NARROW + wide
        whole = np.where(copied, summed, whole) if engine.sharding.fully_sharded else summed
    sharded = np.where(on_host, 0.0, policy.gradients / shards)
    narrowing = np.where(table.optimizer == ADAM, ADAM_STATE / 2, 0.0)
    state = policy.optimizer - ADAM_STATE + layer_state(table)
    if engine.sharding.narrow_moments:
        state = state - narrowing
    parameters = parameters + policy.gathered * secondary_share(engine, table, replicas)
    found = (
        parameters + copy,
        np.where(sharded_gradient_rows(engine, table), sharded, whole),
        np.where(table.offload_optimizer, 0.0, state / shards),
    )
    narrow = narrow_rows(engine, table)
    if not narrow.any():
        return found
    # Shards stay beside gathered weights, and DDP copies gradients into buckets.
    each = np.where(on_host, 0.0, NARROW / shards)
    weights = np.where(frees, each, NARROW + each * (table.zero_stage > 0))
    summed = NARROW * (1 + ((table.zero_stage == 0) & (replicas > 1)))
    gradients = np.where(sharded_gradient_rows(engine, table), each, summed)
    moments = np.where(table.offload_optimizer, 0.0, (layer_state(table) - narrowing) / shards)
    a, b, c = (np.where(narrow, *pair) for pair in zip((weights, gradients, moments), found, strict=True))
    return a, b, c


def model_states(
    engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks, held: tuple[Floats, Floats]
) -> list[Floats]:
    """Bytes of parameters, gradients and optimizer state of each pipeline rank, [n, k] each.

    Args:
        held: numbers of parameters, in the form of `parameters`.
    """
    shared, experts = held
    each = _states(engine, table, table.replicas, table.zero_shards)
    states = [per[:, None] * shared for per in each]
    if sizes.experts.any():
        every = _states(engine, table, table.expert_replicas, table.expert_shards)
        for state, per in zip(states, every, strict=True):
            state += per[:, None] * experts
    if table.fp8_param_gather:
        # Gathered layers take one byte less, and stay.
        narrow = table.gathers_fp8 & ~sharded_parameter_rows(table)
        states[0] = states[0] - narrow[:, None] * (shared - end_parameters(sizes, ranks))
    if casts := engine.memory_policy(table.precision).layer_casts:
        kept = casts * ~sharded_parameter_rows(table)[:, None]
        states[0] = states[0] + kept * (shared - end_parameters(sizes, ranks) + experts)
    if engine.muon.layer_wise and sizes.largest_matrix.any():
        # Whole matrices are shared out: some rank has the largest one.
        per = engine.memory_policy(table.precision).optimizer - ADAM_STATE + layer_state(table)
        least = per * sizes.largest_matrix * ~table.offload_optimizer
        states[2] = np.maximum(states[2], least[:, None] * (ranks.layers > 0))
    more = end_state(table) - layer_state(table)
    if more.any():
        ends = end_parameters(sizes, ranks)
        states[2] = states[2] + (~table.offload_optimizer * more / table.zero_shards)[:, None] * ends
    return states
