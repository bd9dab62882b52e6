"""This rank's part of distributed tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """`local` as a distributed tensor that is split the way `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    # Not from_local, which would move what is offloaded to the host to the device of the mesh.
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def split_dim(place: Placement) -> int | None:
    """The tensor dimension that `place` splits; None where it splits none."""
    dim = getattr(place, "dim", None)
    return None if dim is None else int(dim)
