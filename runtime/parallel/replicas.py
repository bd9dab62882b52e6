"""Marking of parameters that several data- or context-parallel ranks hold whole (ZeRO 0).

The parameters are distributed tensors with a further leading mesh dimension, over which they are replicated.
So the optimizer, checkpoints and the gradient norm know about the copies on other ranks.
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
"""Mesh dimensions of parameter copies."""


def replicate(stage: Transformer, grid: Grid) -> None:
    """Mark the trained parameters of `stage` that other ranks also hold."""
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
    """The ranks with the same part of a parameter, which sum its gradients; None if only this rank has it."""
    dims = _dims(parameter)
    if not isinstance(parameter, DTensor) or not dims or dims[0] not in REPLICAS:
        return None
    group: dist.ProcessGroup = parameter.device_mesh.get_group(dims[0])
    return group


def is_split(parameter: Tensor) -> bool:
    """Return whether ranks split a parameter, or the computation with it."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > (group_of(parameter) is not None)


def without_replicas(parameter: Tensor) -> Tensor:
    """This rank's view of a parameter without the dimension of copies, as used in computation."""
    dims, places = _dims(parameter), _placements(parameter)
    if group_of(parameter) is None or not isinstance(parameter, DTensor):
        return parameter
    if len(dims) == 1:
        return local_part(parameter)
    spec = spec_like(parameter, parameter.device_mesh[dims[1:]], places[1:])
    return as_distributed(local_part(parameter), spec)


def gradient_spec(parameter: Tensor) -> DTensorSpec | None:
    """The distribution of a parameter's gradient after the sum over copies; None if it is not distributed.

    It is a partial sum for ranks that split the computation, but not the parameter.
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
