"""One unit of a model on fake tensors, as a training step has it but for FSDP2: parameters are there, in the
format that computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from costmodels import Layout, ModelSpec
from costmodels.tapes.structure import LAYERS, Unit
from runtime.dryrun import run
from runtime.dryrun.compiled_layers import compiled_layers
from runtime.dryrun.experts import even_load
from runtime.dryrun.fake_gpu import fake_gpu
from runtime.dryrun.kernels import gpu_kernels
from runtime.dryrun.roles import label_layers, roles
from runtime.dryrun.tracker import Tracker
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.loss import TokenLoss
from runtime.parallel.mesh import build_grid
from runtime.settings.options import TrainingOptions
from runtime.train import stages
from runtime.train.balance import Balance


def built_unit(
    stack: ExitStack, tracker: Tracker, model: ModelSpec, layout: Layout, unit: Unit, compiled: bool
) -> tuple[nn.Module, Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    """The parameters of a unit, what runs it, and what makes its input; `stack` ends all of it."""
    device = torch.device("cuda")
    stack.enter_context(run.frozen_objects())
    stack.enter_context(run.fake_process_group(layout.world_size, 0))
    stack.enter_context(fake_gpu())
    grid = build_grid(model, layout, device)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    stack.enter_context(run.meta_builds(fake))
    stack.enter_context(fake)
    stack.enter_context(run.isolated_pipeline())
    stack.enter_context(even_load(model))
    stack.enter_context(gpu_kernels(fake))
    stack.enter_context(roles(tracker))
    if compiled:
        stack.enter_context(compiled_layers(lambda: tracker))
    stack.enter_context(tracker)
    with (
        patch.object(stages, "needs_data_parallel", lambda *_: False),
        patch.object(stages, "wraps_stages", lambda *_: False),
    ):
        stage = stages.build_stage(model, layout, grid, 0, compiled)
    dtype = DTYPES[layout.precision]
    with unset_fake_temporarily():
        _convert(stage, dtype)
    stage.to_empty(device=device)
    stage.tie()
    for router in stage.routers.values():
        router.to_device(device)
    # Only what belongs to layers: the tracker's executor is not needed for one stage.
    loss = TokenLoss(model, layout, grid, compiled)
    executor: Any = _OneStage([stage], loss)
    if stage.routers:
        Balance(executor, model, grid, TrainingOptions())
    label_layers(tracker, executor, compiled, stages.compiles_in_two(layout))
    rows, positions = layout.micro_batch_size, model.seq // layout.context_parallel
    ids = torch.empty(rows, positions, dtype=torch.int64, device=device)
    residual = rows, positions // (layout.tensor_parallel if layout.sequence_parallel else 1), model.hidden
    if unit == "embedding":
        assert stage.embedding is not None
        return stage.embedding, stage.embedding, lambda: ids
    if unit in LAYERS:
        (block,) = stage.blocks
        return block, block, partial(torch.empty, residual, dtype=dtype, device=device)
    module, run_head = _head(stage, loss, ids)
    return module, run_head, partial(torch.empty, residual, dtype=dtype, device=device)


def _head(stage: Transformer, loss: TokenLoss, ids: Tensor) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Norm, head and loss, and modules after them that predict further tokens, with their embedding."""
    loss.score(stage)
    loss.labels = torch.stack([ids] * (1 + len(stage.mtp)), dim=1) if stage.mtp else ids
    further = (stage.embedding, stage.mtp) if stage.mtp else ()
    parts = (stage.norm, stage.head, *further)
    return nn.ModuleList([part for part in parts if part is not None]), stage.end


class _OneStage(NamedTuple):
    stages: list[Transformer]
    loss: TokenLoss


def _convert(stage: Transformer, dtype: torch.dtype) -> None:
    """Let parameters have the format that computes, as FSDP2 gathers them."""
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    stage.tie()
