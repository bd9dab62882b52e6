"""What a device holds besides model states and activations: buffers, and the moment of the peak."""

from __future__ import annotations

import numpy as np

from costmodels.ranks.pipeline import NONE, Ranks
from costmodels.spec.engine import Engine, MemoryPolicy
from costmodels.spec.hardware import Cluster
from costmodels.spec.table import Floats, Ints, LayoutTable

DYNAMIC = ("activations", "logits", "communication", "temporaries")
"""Parts of the peak that come and go within a step."""


FEW = 16
"""Columns that are compared one after the other, for all rows at once."""


def held_outputs(engine: Engine, layer_input: Floats, ranks: Ranks, flying: dict[str, Floats]) -> Floats:
    """Bytes of the outputs of layers that asynchronous reductions still hold, [n, k], or `NONE`.

    A tensor that another stream reads is free once that stream has passed (`torch.Tensor.record_stream`);
    until then the host, which runs ahead of the device, allocates more. It waits for messages of stages: held
    is what one micro batch has on the last rank, and elsewhere those of the warm-up but for two (seen in the
    runs of the Ultra-Scale Playbook).

    Args:
        layer_input: bytes of a gathered input of a layer, 0 without sequence parallelism, [n].
        flying: layers in flight, by kind, each [n, k].
    """
    if not (engine.held_reductions and layer_input.any()):
        return NONE
    ahead = sum(flying.values(), np.zeros(())) - 2 * ranks.layers
    layers = np.where(ranks.last > 0, ranks.layers, np.maximum(ahead, 0.0))
    held: Floats = engine.held_reductions * layers * layer_input[:, None]
    return held


def stepping(policy: MemoryPolicy, table: LayoutTable, shared: Floats, experts: Floats) -> Floats:
    """Bytes that ZeRO 1 and above hold besides states while the optimizer steps, [n, k].

    Args:
        shared: parameters of each pipeline rank without routed experts, [n, k].
        experts: those of the routed experts, [n, k].
    """
    total, zero = np.zeros_like(shared), table.zero_stage >= 1
    for held, replicas, shards in (
        (shared, table.replicas, table.zero_shards),
        (experts, table.expert_replicas, table.expert_shards),
    ):
        per = np.where(zero & (replicas > 1), policy.stepping_whole + policy.stepping_shard / shards, 0.0)
        total = total + per[:, None] * held
    return total


def total(parts: dict[str, Floats]) -> Floats:
    """The sum of parts that broadcast against each other, small ones first."""
    result: Floats = sum(sorted(parts.values(), key=np.size), np.zeros(()))
    return result


def highest(held: Floats) -> Floats:
    """The largest number of each row of [n, k], for few columns many times as fast as `max(axis=1)`."""
    if held.shape[1] > FEW:
        return np.asarray(held.max(axis=1))
    found: Floats = held[:, 0].copy()
    for column in held.T[1:]:
        np.maximum(found, column, out=found)
    return found


def on_rank(parts: dict[str, Floats], rank: Ints) -> dict[str, Floats]:
    """The parts of one pipeline rank of each row, [n] each, of arrays that broadcast to [n, k]."""
    rows = np.arange(len(rank))
    found: dict[str, Floats] = {}
    for name, held in parts.items():
        if held.shape[1] > 1:
            found[name] = held[np.minimum(rows, len(held) - 1), rank]
        else:
            found[name] = np.broadcast_to(held[:, 0], rows.shape)
    return found


def dynamic(parts: dict[str, Floats]) -> Floats:
    """Bytes that come and go within a step, [n, k]."""
    return total({name: parts[name] for name in DYNAMIC})


def at_fuller_moment(parts: dict[str, Floats], step: Floats) -> None:
    """Replace the dynamic `parts` by `step` where the optimizer's step is fuller than the backward pass."""
    fuller = step > dynamic(parts)
    for name in DYNAMIC:
        other = step if name == "temporaries" else NONE
        parts[name] = np.where(fuller, other, parts[name])


def communicator_count(table: LayoutTable, has_experts: bool) -> Floats:
    """Process groups of more than one rank that a device is in, [n]: tp, cp, ep, etp, pp, dp, experts' dp."""
    degrees = [
        table.tensor_parallel,
        table.context_parallel,
        table.expert_parallel,
        table.expert_tensor_parallel,
        table.pipeline_parallel,
        table.replicas,
        table.expert_replicas * has_experts,
    ]
    count = np.zeros(len(table))
    for degree in degrees:
        count += degree > 1
    return count


def margin(
    cluster: Cluster, engine: Engine, table: LayoutTable, lost: Floats, has_experts: bool
) -> dict[str, Floats]:
    """What a device must have besides tensors: the user's margin, or the three terms that it replaces.

    The arrays broadcast to [n, k].

    Args:
        lost: bytes that the allocator holds and cannot use, [n, k].
    """
    if cluster.memory_margin_bytes is not None:
        given = NONE + cluster.memory_margin_bytes
        return {"reserve": NONE, "context": NONE, "communicators": NONE, "margin": given}
    buffers = communicator_count(table, has_experts) * engine.communicator_bytes
    return {
        "reserve": lost,
        "context": NONE + cluster.device.context_bytes,
        "communicators": buffers[:, None],
        "margin": NONE,
    }
