"""The device mesh of a layout: which rank holds which part of the job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from costmodels import Layout


@dataclass(frozen=True)
class Grid:
    """Coordinates of this rank, and the mesh that holds every process group of the layout.

    The mesh has the dimensions pp, dp_replicate, dp_shard, tp; tp varies fastest, so that
    rank = tp + TP * (dp + DP * pp).
    """

    mesh: DeviceMesh
    device: torch.device
    pp_rank: int
    dp_rank: int
    tp_rank: int
    embedding_group: dist.ProcessGroup | None
    """First and last pipeline rank, which share a tied embedding; None on ranks outside of it."""

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the other pipeline stages of this rank's replica."""
        return self.mesh.get_group("pp")


def build_grid(layout: Layout, device: torch.device) -> Grid:
    """Create the process groups of `layout`; every rank of the job must call it.

    ZeRO 0 replicates over data-parallel ranks, ZeRO 1 to 3 shard over them.
    """
    replicate = layout.data_parallel if layout.zero_stage == 0 else 1
    shape = (
        layout.pipeline_parallel,
        replicate,
        layout.data_parallel // replicate,
        layout.tensor_parallel,
    )
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    pp, dp_replicate, dp_shard, tp = (int(index) for index in mesh.get_coordinate() or ())
    ranks = mesh.mesh.reshape(layout.pipeline_parallel, -1)
    embedding_group = None
    if layout.pipeline_parallel > 1:
        for column in ranks.T.tolist():
            group = dist.new_group([column[0], column[-1]])
            if isinstance(group, dist.ProcessGroup) and dist.get_rank() in (column[0], column[-1]):
                embedding_group = group
    return Grid(mesh, device, pp, dp_replicate + dp_shard, tp, embedding_group)
