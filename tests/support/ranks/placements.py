"""Operations on distributed tensors, with and without DTensor's search for how to split their results."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from costmodels import Layout, ModelSpec
from runtime.parallel.placements import UNMOVED, keep_placements
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.ranks.training import CPU


def results(placements: list[Placement]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Visible properties of tensors made from one: by DTensor's search, and without it."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = distribute_tensor(torch.arange(48.0).view(6, 8), mesh, placements)

    def shown() -> list[tuple[Any, ...]]:
        made = (
            whole.detach(),
            torch.nn.Parameter(whole),
            torch.empty_like(whole),
            torch.empty_like(whole, dtype=torch.int64),
            torch.empty_like(whole, device="meta"),
        )
        found = []
        for tensor in made:
            assert isinstance(tensor, DTensor)
            local, spec = tensor.to_local(), tensor._spec
            shares = local.data_ptr() == whole.to_local().data_ptr()
            kind = tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.placements
            found.append((*kind, spec.tensor_meta, local.shape, local.dtype, local.device.type, shares))
        return found

    handlers = DTensor._op_dispatcher._custom_op_handlers
    assert not set(UNMOVED) & set(handlers)
    expected = shown()
    keep_placements()
    return expected, shown()


def searches(spec: ModelSpec, layout: Layout) -> list[str]:
    """Operations for which DTensor searches while a model is built."""
    found: list[str] = []
    search = ShardingPropagator.propagate_op_sharding_non_cached

    def noted(propagator: ShardingPropagator, schema: Any) -> Any:
        found.append(str(schema.op))
        return search(propagator, schema)

    with patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", noted):
        Trainer(spec, layout, TrainingOptions(), CPU)
    return found
