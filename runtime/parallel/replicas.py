"""The marks of parameters that several data- or context-parallel ranks hold whole (ZeRO 0).

The parameters are distributed tensors with one more dimension of the mesh in front, over which nothing is
split. So the optimizer, checkpoints and the norm of the gradient know that other ranks hold the same.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from runtime.model.experts import Experts
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import as_distributed, local_part, partial_sums, spec_like
from runtime.parallel.mesh import Grid

REPLICAS = ("dp_replicate", "e_replicate")
"""Dimensions of the meshes that only copies of parameters are on."""


def replicate(stage: Transformer, grid: Grid) -> None:
    """Let the parameters of `stage` that train, and that other ranks hold too, say so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in stage.modules():
        mesh, replicas = grid.mesh, REPLICAS[0]
        if isinstance(module, Experts):
            assert grid.expert_mesh is not None
            mesh, replicas = grid.expert_mesh, REPLICAS[1]
        if mesh[replicas].size() == 1:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                continue
            if parameter not in made:
                dims = (replicas, *_dims(parameter))
                spec = spec_like(parameter, mesh[dims], (Replicate(), *_placements(parameter)))
                made[parameter] = nn.Parameter(as_distributed(local_part(parameter.detach()), spec))
            module.register_parameter(name, made[parameter])
    stage.tie()


def group_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the same part of a parameter and sum its gradients; None if it is this one."""
    dims = _dims(parameter)
    if not isinstance(parameter, DTensor) or not dims or dims[0] not in REPLICAS:
        return None
    group: dist.ProcessGroup = parameter.device_mesh.get_group(dims[0])
    return group


def is_split(parameter: Tensor) -> bool:
    """Return whether ranks split a parameter, or the computation with it."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > (group_of(parameter) is not None)


def without_replicas(parameter: Tensor) -> Tensor:
    """This rank's view of a parameter that those who hold the same are left out of: how it computes."""
    dims, places = _dims(parameter), _placements(parameter)
    if group_of(parameter) is None or not isinstance(parameter, DTensor):
        return parameter
    if len(dims) == 1:
        return local_part(parameter)
    spec = spec_like(parameter, parameter.device_mesh[dims[1:]], places[1:])
    return as_distributed(local_part(parameter), spec)


def gradient_spec(parameter: Tensor) -> DTensorSpec | None:
    """The distribution of a parameter's gradient that replicas have summed; None if it is not distributed.

    Ranks that split the computation, and not the parameter, have a sum still to make.
    """
    if not isinstance(parameter, DTensor):
        return None
    summed = int(group_of(parameter) is not None)
    places = (*parameter.placements[:summed], *partial_sums(parameter.placements[summed:]))
    return spec_like(parameter, parameter.device_mesh, places)


def _dims(tensor: Tensor) -> tuple[str, ...]:
    return (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()


def _placements(tensor: Tensor) -> tuple[Placement, ...]:
    return tensor.placements if isinstance(tensor, DTensor) else ()
