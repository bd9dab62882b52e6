"""One training step of a layout: batch, gradients, clipping, update."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from costmodels import Layout, ModelSpec
from runtime.data.boundaries import Boundaries
from runtime.data.datasets import check_ids
from runtime.data.packing import with_prompts
from runtime.faults.fault_options import FaultOptions
from runtime.faults.heartbeat import set_operation
from runtime.faults.step_guard import StepGuard
from runtime.optimizers.shards import ShardedOptimizer, clip_factor
from runtime.optimizers.update_rules import update_rule
from runtime.parallel.context import local_positions
from runtime.parallel.cores import keep_to_own_cores
from runtime.parallel.documents import Documents, check_boundaries, document_starts
from runtime.parallel.mesh import build_grid
from runtime.settings.adapter_base import Base
from runtime.settings.loss_scale import loss_scale_of
from runtime.settings.training_options import TrainingOptions
from runtime.train.balance import Balance
from runtime.train.next_tokens import Batch, next_tokens, predicted_tokens, targets_of
from runtime.train.stages import build_executor


class StepResult(NamedTuple):
    """The loss and gradient norm of one step; scalars stay on the device until they are read."""

    loss: Tensor
    """Mean token loss of the global batch before the update, in nats."""
    grad_norm: Tensor
    """L2 norm of the whole gradient of the objective, before clipping."""
    learning_rate: float
    loss_scale: float = 1.0
    """The loss scale of the next step."""
    skipped: bool = False
    """True if the step has only changed the loss scale."""
    further: Tensor | None = None
    """Mean losses of multi-token prediction by depth, [depths]; None without. `loss` does not include
    them."""


def batch_rows(layout: Layout, dp_rank: int, batch: int | None = None) -> npt.NDArray[np.int64]:
    """Rows of a global batch for a data-parallel rank, microbatch after microbatch.

    Each microbatch takes `micro_batch_size` consecutive rows for every rank in turn (Megatron-LM's order).

    Args:
        batch: sequences of the global batch; those of the layout when not given.
    """
    batch = layout.global_batch_size if batch is None else batch
    rows = np.arange(batch).reshape(-1, layout.data_parallel, layout.micro_batch_size)
    return rows[:, dp_rank].reshape(-1)


class Trainer:
    """The model, its gradients and its optimizer, split by `layout`.

    Needs an initialised process group of `layout.world_size` ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        options: TrainingOptions,
        device: torch.device,
        faults: FaultOptions | None = None,
    ) -> None:
        self.spec, self.layout = spec, layout
        self.guard = None if faults is None or not faults.judges_steps else StepGuard(faults)
        """Says which steps must not change the weights; nobody does where `faults` ask for nothing."""
        self.loss_scale = loss_scale_of(options, layout)
        compiled = options.compiles(layout, on_gpu=device.type == "cuda")
        self.grid = build_grid(spec, layout, device)
        self.executor = build_executor(
            spec, layout, self.grid, options.seed, options.init_method_std, compiled
        )
        self.optimizer = ShardedOptimizer(
            self.executor.stages,
            self.grid,
            lambda owned: update_rule(owned, spec, layout, options, self.grid),
        )
        if spec.mtp_depths:
            self.executor.loss.further_losses = torch.zeros(spec.mtp_depths, device=device)
        self.balance = Balance(self.executor, spec, self.grid, options) if spec.moe_layers else None
        """Watches over the load of experts, if there are any."""
        self.learning_rate, self.weight_decay = options.learning_rate(), options.weight_decays()
        self.largest_norm, self.largest_value = options.largest_norm(), options.clip_grad_value
        self.sums_losses = options.loss_reduction == "sum"
        self.rows = batch_rows(layout, self.grid.dp_rank)
        self.positions = local_positions(spec, layout, self.grid.cp_rank)
        self.boundaries: Boundaries | None = None
        self.documents: Documents | None = None
        self.base: Base | None = None
        """The checkpoint that frozen weights came from, where adapters train."""
        self.iteration = 0
        self.updates = 0
        """Iterations that changed the weights; schedules and the optimizer count these."""

    def use_boundaries(self, boundaries: Boundaries | None) -> None:
        """Respect document boundaries from now on; raises `InputError` if the layout cannot."""
        if boundaries is None:
            return
        check_boundaries(boundaries, self.layout)
        self.boundaries = boundaries
        if boundaries.reset_attention_mask or boundaries.reset_position_ids:
            grid = self.grid
            self.documents = Documents(boundaries, self.spec, self.layout, grid.cp_rank, grid.device)
            self.executor.use_documents(self.documents)

    def rows_of(self, batch: int) -> npt.NDArray[np.int64]:
        """Rows that this rank trains of a global batch of `batch` sequences."""
        return batch_rows(self.layout, self.grid.dp_rank, batch)

    def train_step(
        self, samples: npt.NDArray[np.int64], starts: npt.NDArray[np.int64] | None = None
    ) -> StepResult:
        """Train on this rank's rows of a global batch, of the layout's size or smaller.

        Args:
            samples: token ids, [len(rows), S + 1].
            starts: the start position of each token's document, in the same shape, for samples with whole
                documents.
        """
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        tokens, labels = self._inputs(samples, starts)
        # The factor of the mean: the sum of losses is the mean times the number of tokens.
        factor = scale * self.executor.loss.predicted(0) if self.sums_losses else scale
        self.executor.loss.scale = factor
        depths = self.spec.mtp_depths
        if self.executor.loss.further_losses is not None:
            self.executor.loss.further_losses.zero_()
        self._agree_on_scales()
        if self.balance is not None:
            self.balance.begin_step()
        loss = self.executor.train(tokens, labels)
        # The optimizer's step has their memory.
        del tokens, labels
        set_operation("reduction of gradients")
        self.optimizer.collect_gradients()
        totals = torch.stack((self._once(loss), self.optimizer.squared_norm()))
        if self.executor.loss.further_losses is not None:
            totals = torch.cat((totals, self._once(self.executor.loss.further_losses)))
        set_operation("all-reduce of loss and gradient norm")
        if dist.get_world_size() > 1:
            dist.all_reduce(totals)
        loss, norm, further = totals[0], totals[1].sqrt(), totals[2:] / factor if depths else None
        if factor != 1.0:
            loss, norm = loss / factor, norm / scale
        rate = self.learning_rate.at(self.updates)
        self.iteration += 1
        if self._is_skipped(loss, norm):
            self.optimizer.drop_gradients()
            self._end_step(updated=False)
            return StepResult(loss, norm, rate, self._scale(), skipped=True, further=further)
        set_operation("optimizer step")
        self._clip(norm, scale)
        self.optimizer.step(rate, self.weight_decay.at(self.updates))
        self.updates += 1
        self._end_step(updated=True)
        return StepResult(loss, norm, rate, self._scale(), further=further)

    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _is_skipped(self, loss: Tensor, norm: Tensor) -> bool:
        """Return whether to skip this step; loss and norm are those of all ranks, so all ranks decide
        equally.

        In fp16 a gradient overflow with a finite loss is not an error while the loss scale can fall.
        """
        scale, guard = self.loss_scale, self.guard
        if guard is None:
            overflow = scale is not None and not bool(norm.isfinite())
            if scale is not None:
                scale.update(overflow)
            return overflow
        guard.reason = ""
        numbers = torch.stack((loss, norm)).tolist()
        if scale is not None:
            overflow, mends = not math.isfinite(numbers[1]), scale.can_fall
            scale.update(overflow)
            if overflow and (not guard.checks_numbers or (mends and math.isfinite(numbers[0]))):
                return True
        return bool(guard.judge(*numbers))

    def _end_step(self, updated: bool) -> None:
        # All that compiles, and the groups' own threads, are there by now.
        keep_to_own_cores(self.grid.device)
        if self.balance is not None:
            self.balance.end_step(updated)

    def _batch(self, samples: npt.NDArray[np.int64], starts: npt.NDArray[np.int64] | None) -> Batch:
        """A batch with targets according to document boundaries."""
        heeded = self.boundaries
        hides = heeded is not None and heeded.hides_prompts
        hidden = torch.from_numpy(samples < 0) if hides else None
        if hides:
            samples = with_prompts(samples)
        check_ids(samples, self.spec.vocab)
        tokens = torch.from_numpy(samples)
        if heeded is None:
            return Batch(tokens, next_tokens(tokens, None, None))
        if heeded.eod is not None:
            begins = document_starts(tokens, heeded.eod)
        else:
            assert starts is not None, "samples that hold whole documents come with their starts"
            begins = torch.from_numpy(starts)
        labels = next_tokens(tokens, begins if heeded.eod_mask_loss else None, hidden)
        return Batch(tokens, labels, begins, is_packed=heeded.eod is None)

    def _count_tokens(self, batch: Batch) -> None:
        """Set the numbers of tokens, and of predicted tokens, of the global batch in the loss."""
        self.executor.loss.tokens = len(batch.tokens) * self.layout.data_parallel * self.spec.seq
        if not self._hides_targets:
            return
        total = predicted_tokens(targets_of(batch, self.spec.mtp_depths)).to(self.grid.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        # Ranks of one replica hold the same sequences.
        shared = self.layout.data_parallel / dist.get_world_size()
        self.executor.loss.targets = tuple(max(1.0, count * shared) for count in total.tolist())

    @property
    def _hides_targets(self) -> bool:
        """True if some tokens may not be predicted."""
        return self.boundaries is not None and (
            self.boundaries.eod_mask_loss or self.boundaries.hides_prompts
        )

    def _clip(self, norm: Tensor, scale: float) -> None:
        """Clip gradients that are `scale` times too large, whose true norm is `norm`."""
        if self.largest_norm:
            self.optimizer.scale(clip_factor(norm, self.largest_norm) / scale)
        elif scale != 1.0:
            self.optimizer.scale(torch.full_like(norm, 1.0 / scale).float())
        if self.largest_value is not None:
            self.optimizer.clip_values(self.largest_value)

    def evaluate(self, samples: npt.NDArray[np.int64], starts: npt.NDArray[np.int64] | None = None) -> float:
        """Mean token loss of a global batch, from this rank's rows in the form of `train_step`."""
        tokens, labels = self._inputs(samples, starts)
        self.executor.loss.scale = 1.0
        self._agree_on_scales()
        total = self._once(self.executor.evaluate(tokens, labels))
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return float(total)

    def close(self) -> None:
        """Free objects that must end before communicators do."""
        if self.executor.graphed is not None:
            self.executor.graphed.end()

    def _agree_on_scales(self) -> None:
        if self.executor.float8_gather is not None:
            self.executor.float8_gather.agree()

    def _inputs(
        self, samples: npt.NDArray[np.int64], starts: npt.NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs of the executor for some samples; also sets these samples in the loss and the layers."""
        batch = self._batch(samples, starts)
        self._count_tokens(batch)
        inputs = batch.tokens[:, self.positions]
        device = self.grid.device
        if self.documents is not None:
            assert batch.starts is not None
            self.documents.start_batch(batch.starts[:, :-1].to(device, non_blocking=True))
        labels = targets_of(batch, self.spec.mtp_depths)[..., self.positions]
        return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _once(self, loss: Tensor) -> Tensor:
        """The loss on one of the tensor-parallel ranks, which all have the same loss; zero on the others."""
        return loss.double() if self.grid.tp_rank == 0 else torch.zeros_like(loss, dtype=torch.float64)
