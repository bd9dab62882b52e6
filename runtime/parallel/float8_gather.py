"""Weights of 8-bit GEMMs, gathered in 8 bits by FSDP2.

Ranks agree on the largest element of each weight once a step, before they gather any weight. Each rank then
casts its shard to the same bits as a cast of the whole weight, gathered in 16 bits, would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from costmodels import Layout
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.float8_tensorwise import (
    Float8Weight,
    cast,
    formats,
    multiplies_narrow,
    scale_for,
)


class Float8Gather:
    """The weights of some stages that are gathered in 8 bits, with their scales."""

    def __init__(self, stages: Sequence[Transformer], layout: Layout) -> None:
        self.shards: dict[dist.ProcessGroup, list[Tensor]] = {}
        """This rank's shards in fp32, by the ranks that hold the others."""
        self.scales: dict[dist.ProcessGroup, Tensor] = {}
        self.computes, self.dtype = DTYPES[layout.precision], formats().operand
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, nn.Linear) and multiplies_narrow(module):
                    self._take(module.weight)
        for group, shards in self.shards.items():
            self.scales[group] = torch.ones(len(shards), device=shards[0].device)
            for shard, scale in zip(shards, self.scales[group].unbind(), strict=True):
                _extend(shard, scale, self.computes, self.dtype)

    def _take(self, weight: Tensor) -> None:
        mesh = _sharing(weight)
        if mesh is not None:
            assert isinstance(weight, DTensor)
            self.shards.setdefault(mesh.get_group(), []).append(weight._local_tensor)

    @torch.no_grad()
    def agree(self) -> None:
        """Compute the scales of the present weights."""
        for group, shards in self.shards.items():
            norms = torch._foreach_norm(shards, ord=float("inf"))
            # The weights that are cast have been rounded to 16 bits, and so has the largest of them.
            largest = torch.stack(list(norms)).to(self.computes)
            widest = largest.float()
            dist.all_reduce(widest, dist.ReduceOp.MAX, group=group)
            self.scales[group].copy_(scale_for(widest, self.dtype))


def _sharing(weight: Tensor) -> DeviceMesh | None:
    """The ranks that split the rows of a weight evenly, one dimension of its mesh; None where none do."""
    if not isinstance(weight, DTensor):
        return None
    names = weight.device_mesh.mesh_dim_names or ()
    if "dp_shard" not in names:
        return None
    mesh = weight.device_mesh["dp_shard"]
    place = weight.placements[names.index("dp_shard")]
    even = isinstance(place, Shard) and place.dim == 0 and weight.shape[0] % mesh.size() == 0
    return mesh if even else None


def _extend(shard: Tensor, scale: Tensor, computes: torch.dtype, dtype: torch.dtype) -> None:
    """Let FSDP2 gather a shard with its extension hooks, which it finds on the sharded tensor."""
    extended: Any = shard

    def before(mesh: DeviceMesh, size: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        return (cast(shard.to(computes), scale, dtype),), None

    def after(gathered: tuple[Tensor, ...], metadata: Any, computed: Any, *, out: Any = None) -> Any:
        # A weight that was made before shares the memory that is filled anew.
        return None if out is not None else (Float8Weight(gathered[0], scale, computes), ())

    extended.fsdp_pre_all_gather, extended.fsdp_post_all_gather = before, after
