"""Distributed tensors with operations that keep their split."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten

UNMOVED = (aten.detach.default, aten.empty_like.default)
"""Operators that are applied to every parameter when a model is built."""


def keep_placements() -> None:
    """Let DTensor split results of `UNMOVED` like their operand, without a search.

    The search compares all splits over all mesh dimensions, again for every shape; with four dimensions it
    takes a tenth of a second for each parameter.
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
