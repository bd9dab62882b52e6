"""Bytes of saving and reading a checkpoint: in files, in host memory, and on a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.optimizer import ADAM_STATE, UPDATES
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.states import MASTER
from costmodels.memory.unit_sizes import end_parameters, rank_parameters, row_unit_sizes
from costmodels.ranks.rank_layers import ranks_of_table
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate, StageMemory
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable


class StoredBytes(NamedTuple):
    """Bytes of each parameter in a checkpoint."""

    weights: float
    """Bytes of the weight, and of its master copy if it is stored separately."""
    layers: float
    """Bytes of weight and optimizer state for each parameter of a layer."""
    ends: float
    """Bytes of weight and optimizer state for each parameter of the embedding or the head."""


def stored_bytes(cluster: Cluster, engine: Engine, layout: Layout) -> StoredBytes:
    """Bytes of each parameter in a checkpoint of a layout.

    An engine that trains its master copy of the weights (FSDP2) stores no second copy.
    """
    optimizer = UPDATES[layout.optimizer]
    policy = engine.for_device(cluster.device).memory_policy(layout.precision)
    # More than a master copy is gradients, which no checkpoint holds.
    master = min(max(policy.optimizer - ADAM_STATE, 0.0), MASTER)
    weights = master if engine.sharding.fully_sharded and master > 0 else policy.parameters + master
    return StoredBytes(weights, weights + optimizer.layers, weights + optimizer.ends)


def checkpoint_bytes(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> float:
    """Bytes of the weights and the optimizer's state of the whole model, each parameter once."""
    each = stored_bytes(cluster, engine, layout)
    ends = model.embedding_parameters + (0 if model.tied else model.vocab * model.hidden)
    return (model.parameters - ends) * each.layers + ends * each.ends


@dataclass(frozen=True)
class CheckpointMemory:
    """Bytes that one save and one resume need besides those of the step."""

    device_bytes: float
    """The part of a checkpoint that the fullest device writes; all devices write at once."""
    host_bytes: float | None
    """Host memory that the save of one device needs; None where the engine's way of saving is not known."""
    node_host_bytes: float | None
    """Host memory that the saves of all devices of one node need."""
    resume_bytes: float | None
    """All bytes on the fullest device while a checkpoint is read; None where unknown."""
    read_bytes: float
    """Bytes that all devices read together to resume: devices with the same weights each read them."""


def checkpoint_memory(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    layout: Layout,
    estimate: Estimate,
    async_save: bool = False,
) -> CheckpointMemory:
    """The host memory of a save and the device memory of a resume of a layout.

    Ranks with the same parameters divide the writing (as `torch.distributed.checkpoint`'s planner and
    Megatron-Core's fully parallel save do). An asynchronous save writes a copy in host memory; a synchronous
    save may write a copy, too (`CheckpointConstants.host_copies`).

    Args:
        estimate: estimate of the layout.
    """
    each = stored_bytes(cluster, engine, layout)
    table = LayoutTable.of([layout])
    sizes = row_unit_sizes(model, engine, *distinct_shapes(table))
    ranks = ranks_of_table(model, table)
    shared, experts = rank_parameters(sizes, ranks)
    ends = end_parameters(sizes, ranks)

    def parts(copies: float, expert_copies: float, of_layers: float, of_ends: float) -> Floats:
        layers = (shared - ends) * of_layers + ends * of_ends
        result: Floats = np.ravel(layers / copies + experts * of_layers / expert_copies)
        return result

    replicas, expert_replicas = float(table.replicas[0]), float(table.expert_replicas[0])
    share = float(parts(replicas, expert_replicas, each.layers, each.ends).max())
    how = engine.checkpoints
    copies = max(how.host_copies or 0.0, 1.0) if async_save else how.host_copies
    host = None if copies is None else copies * share
    state = parts(*_shards(table), each.layers - each.weights, each.ends - each.weights)
    read = _read_bytes(model, cluster, engine, layout, each, table)
    resume = None
    if how.resume_states is not None:
        extra = how.resume_states * (0.0 if layout.offload_optimizer else 1.0) * state
        held = [_resting(engine, one) for one in estimate.memory]
        resume = float(max(np.array(held) + np.resize(extra, len(held))))
    local = min(cluster.devices_per_node, cluster.world_size)
    return CheckpointMemory(share, host, None if host is None else host * local, resume, read)


def _shards(table: LayoutTable) -> tuple[float, float]:
    return float(table.zero_shards[0]), float(table.expert_shards[0])


def _read_bytes(
    model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout, each: StoredBytes, table: LayoutTable
) -> float:
    """Bytes that all devices read: weights times their copies, and optimizer states times their copies."""
    whole = checkpoint_bytes(model, cluster, engine, layout)
    copies = layout.data_parallel * layout.context_parallel
    if engine.sharding.fully_sharded:
        return whole * copies / layout.zero_shards
    weights = model.parameters * engine.memory_policy(layout.precision).parameters
    return weights * copies + (whole - weights) * copies / layout.zero_shards


def _resting(engine: Engine, stage: StageMemory) -> float:
    """Bytes on a device between steps: no activations, and with FSDP2 no gradients."""
    gone = stage.activations + stage.logits + stage.temporaries + stage.communication + stage.doubt
    gradients = stage.gradients if engine.sharding.fully_sharded else 0.0
    return stage.total - gone - gradients
