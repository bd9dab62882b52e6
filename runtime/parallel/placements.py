"""Distributed tensors whose operations leave them split as they are."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten

UNMOVED = (aten.detach.default, aten.empty_like.default)
"""Operators that building a model applies to every parameter."""


def keep_placements() -> None:
    """Let DTensor split results of `UNMOVED` as their operand is, instead of searching for the best way.

    The search weighs all ways to split over all dimensions of the mesh, anew for every shape: with four
    dimensions it takes a tenth of a second of each parameter.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers |= dict.fromkeys(UNMOVED, _split_alike)


def _split_alike(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> DTensor:
    whole, *rest = arguments
    local = operation(whole._local_tensor, *rest, **options)
    spec = whole._spec
    if local.dtype != spec.tensor_meta.dtype:
        spec = copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]
