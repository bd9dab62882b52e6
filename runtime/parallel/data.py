"""Sharding of one stage's parameters over data- and context-parallel ranks: ZeRO 1 to 3 by FSDP2."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from costmodels import Layout
from runtime.model.experts import MixtureOfExperts
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.accelerator import is_accelerator
from runtime.parallel.local_tensors import local_part
from runtime.parallel.mesh import Grid, expert_mesh_shape

# The loss reads the logits of a split head, a view, and never writes to them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def needs_data_parallel(layout: Layout, grid: Grid) -> bool:
    """Return whether ranks hold copies or shards of parameters, or the host keeps them.

    Tensor-parallel ranks also hold copies of the same experts, unless experts are spread over them.
    """
    shares = layout.data_parallel * layout.context_parallel > 1
    if grid.expert_mesh is not None:
        shares = shares or math.prod(expert_mesh_shape(layout)[1:3]) > 1
    return shares or layout.offload_optimizer


def wraps_stages(layout: Layout) -> bool:
    """Return whether FSDP2 wraps the stages, to shard or to offload parameters.

    If ranks hold whole parameters, `runtime.parallel.working_copies` reduces their gradients.
    """
    return layout.zero_stage > 0 or layout.offload_optimizer


def data_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Shard `stage` with FSDP2 (ZeRO 1 to 3), also over some of the ranks (hybrid), or offload it (ZeRO 0).

    Gradients are summed, not averaged: the loss is already divided by the tokens of the global batch.
    Gradients of several microbatches are accumulated in the format of the reduction too, as with
    Megatron-LM's `--grad-reduce-in-bf16`; the optimizer always gets fp32.

    With an offloaded optimizer, the fp32 shards are in host memory. FSDP2 copies them to the device before it
    gathers parameters, and copies reduced gradients back. Fewer ranks hold the same experts than the same
    other parameters, so each layer's experts are wrapped separately, on the expert mesh.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout.precision], reduce_dtype=DTYPES[layout.gradient_reduction]
    )
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(grid.device)) if layout.offload_optimizer else None
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload or OffloadPolicy()}
    mesh = _mesh(grid.mesh, ("dp_replicate", "dp_shard"), layout)
    frees = layout.zero_stage == 3
    for block in stage.blocks:
        experts = block.mlp.experts if isinstance(block.mlp, MixtureOfExperts) else None
        if experts is not None:
            assert grid.expert_mesh is not None
            own = _mesh(grid.expert_mesh, ("e_replicate", "e_shard"), layout)
            shards = own["e_shard"].size()
            fully_shard(
                experts,
                mesh=own,
                reshard_after_forward=frees,
                shard_placement_fn=partial(_expert_placement, shards=shards),
                **options,
            )
            _sum_gradients(experts, own)
        wrapped: Any = fully_shard(block, mesh=mesh, reshard_after_forward=frees, **options)
        _sum_gradients(wrapped, mesh)
        if experts is not None:
            # The host waits for the sizes of parts before experts compute: gather their weights ahead of it.
            wrapped.set_modules_to_forward_prefetch([experts])
    for module in stage.mtp:
        _sum_gradients(fully_shard(module, mesh=mesh, reshard_after_forward=frees, **options), mesh)
    # Embedding and head are the first that backward gathers: PyTorch's default keeps them.
    fully_shard(stage, mesh=mesh, reshard_after_forward=None if frees else False, **options)
    _sum_gradients(stage, mesh)


def _sum_gradients(module: Any, mesh: DeviceMesh) -> None:
    # A factor makes PyTorch before 2.15 copy gradients that have nobody to be added to.
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _mesh(mesh: DeviceMesh, dims: tuple[str, str], layout: Layout) -> DeviceMesh:
    """The mesh of the ranks with copies of a parameter: both `dims`, or only that of the shards."""
    replicas, shards = dims
    return mesh[shards] if layout.zero_stage > 0 and mesh[replicas].size() == 1 else mesh[dims]


def _expert_placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """The first dimension of a parameter of experts that `shards` ranks can share evenly."""
    local = local_part(parameter)
    even = (dim for dim, size in enumerate(local.shape) if size % shards == 0)
    return Shard(next(even, 0))


def gather_once(stage: Transformer) -> None:
    """Gather and free parameters once, as FSDP2 moves uneven shards into padded storage on first use."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
