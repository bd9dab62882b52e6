"""Seconds of what data-parallel ranks exchange, and of the optimizer.

ZeRO's volumes (Rajbhandari et al., arXiv:1910.02054, section 7): one all-reduce of the gradients, or a
reduce-scatter of gradients and an all-gather of parameters; stage 3 gathers in every forward and
backward pass.
"""

from __future__ import annotations

import numpy as np

from costmodels.engine import Engine
from costmodels.hardware import Cluster
from costmodels.memory import memory_policy, shards_gradients
from costmodels.network import Group, all_gather, group, reduce_scatter
from costmodels.operators import expert_replicas, expert_tensor_parallel
from costmodels.table import Floats, LayoutTable

ADAM_BYTES = 28.0
"""Traffic of Adam per parameter in fp32: reads weight, gradient and two moments, writes three of them."""


def exchange_seconds(
    cluster: Cluster,
    engine: Engine,
    table: LayoutTable,
    shared: Floats,
    experts: Floats,
    layers: Floats,
    forward: Floats,
    backward: Floats,
) -> Floats:
    """Seconds of gradient reduction and parameter gathering that computation does not hide, [n].

    Args:
        shared: parameters on one device outside routed experts.
        experts: parameters of routed experts on one device, which fewer ranks replicate.
        layers: layers on the device; each is one call.
        forward: seconds of one micro batch's forward pass on a device.
        backward: the same of its backward pass.

    The reductions hide behind the backward passes that produce gradients, a gathering behind the
    forward pass that needs the parameters; at most `engine.data_parallel_overlap` of all hides.
    """
    policy = memory_policy(engine, table.precision)
    stage, micro_batches = table.zero_stage, table.micro_batches
    eager = shards_gradients(engine, table)
    reductions = np.where(eager, micro_batches, 1)
    gathers = np.where(stage == 3, 2 * micro_batches, np.minimum(stage, 1))

    def seconds(members: Group, count: Floats) -> Floats:
        scatter = reduce_scatter(members, count * policy.reduced, layers)
        gather = all_gather(members, count * policy.gathered, layers)
        return np.where(stage == 0, 2.0 * scatter, reductions * scatter + gathers * gather)

    efficiency = engine.network_efficiency
    replicas = table.data_parallel * table.context_parallel
    total = seconds(group(cluster, efficiency, replicas, table.tensor_parallel), shared)
    if experts.any():
        holders = (expert_tensor_parallel(table) * table.expert_parallel).astype(np.int64)
        copies = expert_replicas(table).astype(np.int64)
        total = total + seconds(group(cluster, efficiency, copies, holders), experts)
    # Stage 3 gathers in every pass, the others in the first forward pass.
    once = np.minimum(stage, 1) * forward + reductions * backward
    window = np.where(stage == 3, micro_batches * (forward + backward), once)
    return total - np.minimum(engine.data_parallel_overlap * total, window)


def optimizer_seconds(
    engine: Engine, bandwidth: float, table: LayoutTable, shared: Floats, experts: Floats
) -> Floats:
    """Seconds of one Adam step on one device, [n]: bytes through memory at `bandwidth`.

    Each rank updates its shard (from ZeRO 1 on), writes the parameters that matrix products read,
    and clears the gradients.
    """
    policy = memory_policy(engine, table.precision)
    whole = policy.gathered + policy.gradients
    shards = np.where(table.zero_stage >= 1, table.data_parallel * table.context_parallel, 1)
    expert_shards = np.where(table.zero_stage >= 1, expert_replicas(table), 1.0)
    traffic = shared * (ADAM_BYTES / shards + whole) + experts * (ADAM_BYTES / expert_shards + whole)
    return traffic / (bandwidth * engine.memory_efficiency)
