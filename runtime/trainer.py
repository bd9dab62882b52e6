"""One training step of a layout: batch, gradients, clipping, update."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from costmodels import Layout, ModelSpec
from runtime.context_parallel import local_positions
from runtime.grid import build_grid
from runtime.loss_scale import loss_scale_of
from runtime.optimizer import ShardedAdamW, clip_factor
from runtime.options import TrainingOptions
from runtime.stages import build_executor


class StepResult(NamedTuple):
    """What one step reports; scalars stay on the device until they are read."""

    loss: Tensor
    """Mean token loss of the global batch before the update, in nats."""
    grad_norm: Tensor
    """L2 norm of the whole gradient before clipping."""
    learning_rate: float
    loss_scale: float = 1.0
    """Of the next step."""
    skipped: bool = False
    """The gradient overflowed in fp16: the step has changed nothing but the loss scale."""


def batch_rows(layout: Layout, dp_rank: int) -> npt.NDArray[np.int64]:
    """Rows of the global batch that a data-parallel rank trains, micro batch after micro batch.

    Each micro step consumes `micro_batch_size` consecutive rows of every rank (Megatron-LM's order).
    """
    rows = np.arange(layout.global_batch_size).reshape(-1, layout.data_parallel, layout.micro_batch_size)
    return rows[:, dp_rank].reshape(-1)


class Trainer:
    """The model, its gradients and its optimizer, split as `layout` says.

    Needs an initialised process group of `layout.world_size` ranks.
    """

    def __init__(
        self, spec: ModelSpec, layout: Layout, options: TrainingOptions, device: torch.device
    ) -> None:
        self.layout = layout
        self.loss_scale = loss_scale_of(options, layout)
        compiled = options.compiles(layout, on_gpu=device.type == "cuda")
        self.grid = build_grid(spec, layout, device)
        self.executor = build_executor(
            spec, layout, self.grid, options.seed, options.init_method_std, compiled
        )
        self.optimizer = ShardedAdamW(
            self.executor.stages,
            self.grid,
            (options.adam_beta1, options.adam_beta2),
            options.adam_eps,
            options.weight_decay,
        )
        self.learning_rate = options.learning_rate()
        self.clip_grad = options.clip_grad
        self.rows = batch_rows(layout, self.grid.dp_rank)
        self.positions = local_positions(spec, layout, self.grid.cp_rank)
        self.iteration = 0
        self.updates = 0
        """Iterations that changed the weights; the learning rate and Adam count these."""

    def train_step(self, samples: npt.NDArray[np.int64]) -> StepResult:
        """Train on this rank's rows of a global batch, [len(self.rows), S + 1] token ids."""
        scale = 1.0
        if self.loss_scale is not None:
            self.executor.loss.scale = scale = self.loss_scale.value
        loss = self.executor.train(*self._inputs(samples))
        self.optimizer.collect_gradients()
        totals = torch.stack((self._once(loss), self.optimizer.squared_norm()))
        if dist.get_world_size() > 1:
            dist.all_reduce(totals)
        loss, norm = totals[0], totals[1].sqrt()
        rate = self.learning_rate.at(self.updates)
        self.iteration += 1
        if self.loss_scale is not None:
            loss, norm = loss / scale, norm / scale
            # The norm is that of all ranks, so all skip the same steps.
            overflow = not bool(norm.isfinite())
            self.loss_scale.update(overflow)
            if overflow:
                self.optimizer.drop_gradients()
                return StepResult(loss, norm, rate, self.loss_scale.value, skipped=True)
        self._update(norm, rate, scale)
        return StepResult(loss, norm, rate, 1.0 if self.loss_scale is None else self.loss_scale.value)

    def _update(self, norm: Tensor, rate: float, scale: float) -> None:
        """Clip gradients that are `scale` times too large, whose true norm is `norm`, and apply them."""
        if self.clip_grad:
            self.optimizer.scale(clip_factor(norm, self.clip_grad) / scale)
        elif scale != 1.0:
            self.optimizer.scale(torch.full_like(norm, 1.0 / scale).float())
        self.optimizer.step(rate)
        self.updates += 1

    def evaluate(self, samples: npt.NDArray[np.int64]) -> float:
        """Mean token loss of a global batch, given this rank's rows of it."""
        if self.loss_scale is not None:
            self.executor.loss.scale = 1.0
        total = self._once(self.executor.evaluate(*self._inputs(samples)))
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return float(total)

    def _inputs(self, samples: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        batch = torch.from_numpy(samples)
        inputs, labels = (batch[:, self.positions + shift] for shift in (0, 1))
        device = self.grid.device
        return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _once(self, loss: Tensor) -> Tensor:
        """The loss on one of the tensor-parallel ranks, which all hold the same; zero on the others."""
        return loss.double() if self.grid.tp_rank == 0 else torch.zeros_like(loss, dtype=torch.float64)
