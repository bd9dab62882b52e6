"""This rank's part of distributed tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """`local` as a distributed tensor that is split like `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    # Not from_local, which would move what is offloaded to the host to the device of the mesh.
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def spec_like(tensor: Tensor, mesh: DeviceMesh, places: Sequence[Placement]) -> DTensorSpec:
    """The specification of a tensor like `tensor` on a mesh with the placements `places`."""
    return DTensorSpec(mesh, tuple(places), TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))


def as_distributed(local: Tensor, spec: DTensorSpec | None) -> Tensor:
    """`local` as a distributed tensor; unchanged without a `spec`."""
    if spec is None:
        return local
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def partial_sums(places: Iterable[Placement]) -> list[Placement]:
    """Placements of the gradient of a tensor with `places`: replicated becomes a partial sum."""
    return [Partial() if place.is_replicate() else place for place in places]


def split_dim(place: Placement) -> int | None:
    """The tensor dimension that `place` splits; None where it splits none."""
    dim = getattr(place, "dim", None)
    return None if dim is None else int(dim)
