"""The device mesh of a layout: the part of the job on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from costmodels import Layout, ModelSpec


@dataclass(frozen=True)
class Grid:
    """Coordinates of this rank, and the process groups of the layout.

    rank = tp + TP * (cp + CP * (dp + DP * pp)). The mesh has the dimensions pp, dp_replicate, dp_shard, tp:
    data- and context-parallel ranks together hold copies of the parameters, one copy for each `zero_shards`
    neighbouring ranks. Experts have a separate mesh over the same ranks: pp, e_replicate, e_shard, ep, etp
    (Megatron-LM's order etp-ep-edp-pp).
    """

    mesh: DeviceMesh
    device: torch.device
    pp_rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int
    cp_group: dist.ProcessGroup | None = None
    """Ranks that share this rank's sequences; None without context parallelism."""
    kv_group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks that share one key/value head; None if each has its own."""
    expert_mesh: DeviceMesh | None = None
    """The mesh of experts; None for a model without experts."""
    sequence_group: dist.ProcessGroup | None = None
    """Ranks over which a sequence's tokens are spread during routing: tensor- and context-parallel ones, in
    this order. None if one rank has all tokens, or without experts."""
    embedding_group: dist.ProcessGroup | None = None
    """Two pipeline ranks that share an embedding (tied, or read by multi-token prediction); None if one rank
    has both copies or none."""

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the other pipeline stages of this rank's replica."""
        return self.mesh.get_group("pp")


def expert_mesh_shape(layout: Layout) -> tuple[int, int, int, int, int]:
    """Sizes of pp, e_replicate, e_shard, ep, etp.

    ZeRO splits experts over those of the `zero_shards` neighbours that have the same experts.
    """
    ep, etp = layout.expert_parallel, layout.expert_tensor_parallel
    holders = layout.world_size // (layout.pipeline_parallel * ep * etp)
    shards = max(1, holders // layout.zero_replicas) if layout.zero_stage else 1
    return layout.pipeline_parallel, holders // shards, shards, ep, etp


def build_grid(spec: ModelSpec, layout: Layout, device: torch.device) -> Grid:
    """Create the process groups of `layout` for `spec`; every rank of the job must call it."""
    tp, cp, pp = layout.tensor_parallel, layout.context_parallel, layout.pipeline_parallel
    replicas = cp * layout.data_parallel // layout.zero_shards
    shape = (pp, replicas, layout.zero_shards, tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    ranks = torch.arange(layout.world_size).view(pp, layout.data_parallel, cp, tp)
    pp_rank, dp_rank, cp_rank, tp_rank = (int(i) for i in (ranks == dist.get_rank()).nonzero()[0])
    sharers = tp // spec.kv_heads if tp > spec.kv_heads else 1
    cp_group = _own_group(ranks.transpose(2, 3).reshape(-1, cp))
    expert_mesh = sequence_group = None
    if spec.experts:
        names = ("pp", "e_replicate", "e_shard", "ep", "etp")
        expert_mesh = init_device_mesh(device.type, expert_mesh_shape(layout), mesh_dim_names=names)
        sequence_group = cp_group if tp == 1 else mesh.get_group("tp")
        if tp > 1 and cp > 1:
            sequence_group = _own_group(ranks.reshape(-1, cp * tp))
    shares = spec.tied or spec.mtp is not None
    apart = shares and pp > 1 and layout.stages_of(0)[-1] != len(layout.layers_per_stage) - 1
    return Grid(
        mesh=mesh,
        device=device,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        tp_rank=tp_rank,
        cp_group=cp_group,
        kv_group=_own_group(ranks.reshape(-1, sharers)),
        expert_mesh=expert_mesh,
        sequence_group=sequence_group,
        embedding_group=_own_group(ranks.reshape(pp, -1)[[0, -1]].T) if apart else None,
    )


def _own_group(rows: torch.Tensor) -> dist.ProcessGroup | None:
    """The process group of this rank's row of ranks; None if it is alone or in no row."""
    own = rows[(rows == dist.get_rank()).any(1)].flatten()
    if own.numel() < 2:
        return None
    # Only its members meet: thousands of ranks need not wait for each other's groups.
    group: Any = dist.new_group(own.tolist(), use_local_synchronization=True)
    return group if isinstance(group, dist.ProcessGroup) else None
