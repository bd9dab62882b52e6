"""Forward and backward of one global batch through a pipeline schedule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from costmodels import Layout, ModelSpec
from costmodels.spec.layout import SPLIT_BACKWARD, Schedule
from costmodels.spec.send_order import SENDS_OF_STAGE
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.documents import Documents
from runtime.parallel.loss import TokenLoss
from runtime.parallel.mesh import Grid
from runtime.parallel.pipeline_stage import LeanStage
from runtime.parallel.send_limit import keeps_messages, limit_sends
from runtime.parallel.working_copies import WorkingCopies, computing

if TYPE_CHECKING:
    from runtime.parallel.float8_gather import Float8Gather
    from runtime.parallel.graphed_pass import GraphedPass

SCHEDULES: dict[Schedule, type] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

FORWARD_ACTIONS = ("F", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""PyTorch's pipeline actions for forward passes."""


class Pipeline:
    """Layers spread over pipeline ranks, run by one of PyTorch's schedules."""

    float8_gather: Float8Gather | None = None
    graphed: GraphedPass | None = None

    def __init__(
        self,
        stages: list[Transformer],
        spec: ModelSpec,
        layout: Layout,
        grid: Grid,
        loss: TokenLoss,
        copies: list[WorkingCopies],
    ) -> None:
        self.stages, self.copies = stages, copies
        self.loss = loss
        self.device = grid.device
        self.is_first = any(stage.embedding is not None for stage in stages)
        self.is_last = any(stage.head is not None for stage in stages)
        if layout.schedule in SPLIT_BACKWARD:
            _keep_gathered(stages)
        self.micro_batch_size = layout.micro_batch_size
        self.kind: Any = SCHEDULES[layout.schedule]
        self.wrapped = [
            _pipeline_stage(stage, index, spec, layout, grid)
            for stage, index in zip(stages, layout.stages_of(grid.pp_rank), strict=True)
        ]
        for wrapped, one in zip(self.wrapped, copies, strict=False):
            wrapped.copies = one
        for stage, wrapped in zip(stages, self.wrapped, strict=True):
            if stage.head is not None:
                loss.score(stage)
                wrapped.loss = loss
        self._plan(layout.micro_batches)

    def _plan(self, micro_batches: int) -> None:
        """Make the schedules of training and evaluation for batches of this size."""
        self.micro_batches = micro_batches
        self.schedule = self.kind(
            self.wrapped[0] if self.kind is Schedule1F1B else self.wrapped,
            n_microbatches=micro_batches,
            loss_fn=_loss_of_stage,
            scale_grads=False,
        )
        if self.kind is not Schedule1F1B and keeps_messages():
            # PyTorch would keep the messages of a whole step.
            self.schedule.pipeline_order_with_comms = limit_sends(
                self.schedule.pipeline_order_with_comms,
                self.schedule.stage_index_to_group_rank.__getitem__,
                SENDS_OF_STAGE * len(self.wrapped),
            )
        # PyTorch's eval walks through the backward actions too, and a V fails at them.
        self.evaluation = copy.copy(self.schedule)
        if self.kind is not Schedule1F1B:
            self.evaluation.pipeline_order_with_comms = {
                rank: _forward_only(actions)
                for rank, actions in self.schedule.pipeline_order_with_comms.items()
            }

    def use_documents(self, documents: Documents) -> None:
        for stage in self.wrapped:
            stage.documents = documents

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self._fit(tokens)
        return self._run(self.schedule.step, tokens, labels)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self._fit(tokens)
        return self._run(self.evaluation.eval, tokens, labels)

    def _fit(self, tokens: Tensor) -> None:
        """Plan again for another batch size, as stages are prepared for one number of microbatches."""
        micro_batches = len(tokens) // self.micro_batch_size
        if micro_batches != self.micro_batches:
            self._plan(micro_batches)

    def _run(self, step: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        arguments = (tokens,) if self.is_first else ()
        labels_of = torch.split(labels, self.micro_batch_size)
        for stage in self.wrapped:
            stage.labels = labels_of
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": labels, "losses": losses} if self.is_last else {}
        with computing(self.copies):
            step(*arguments, return_outputs=False, **options)
        self.loss.labels = None
        for stage in self.wrapped:
            stage.labels = ()
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)


def _loss_of_stage(output: Tensor, target: Tensor) -> Tensor:
    """The loss, which is the output of the last stage."""
    return output


def _forward_only(actions: list[Any]) -> list[Any]:
    """The actions of one rank for forward passes, in PyTorch's form, including communication."""
    parts = [part for action in actions for part in action.sub_actions or (action,)]
    return [part for part in parts if part.computation_type.value in FORWARD_ACTIONS]


def _keep_gathered(stages: Sequence[Transformer]) -> None:
    """Keep parameters whole from the first to the last action of a step, even under ZeRO 3.

    Split-backward schedules look for a graph's weights before FSDP2 would gather them, and the gradients of
    weights that are not found are lost.
    """
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_reshard_after_forward(False)


def _pipeline_stage(stage: Transformer, index: int, spec: ModelSpec, layout: Layout, grid: Grid) -> LeanStage:
    """Wrap a stage with given shapes of input and output, so that PyTorch sends no messages to infer them."""
    batch, tp = layout.micro_batch_size, layout.tensor_parallel
    seq = spec.seq // layout.context_parallel
    local_seq = seq // tp if layout.sequence_parallel else seq
    dtype = DTYPES[layout.precision]
    activation = torch.empty(batch, local_seq, spec.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    loss = torch.empty((), dtype=torch.float32, device="meta")
    return LeanStage(
        stage,
        index,
        len(layout.layers_per_stage),
        grid.device,
        input_args=(activation if stage.embedding is None else tokens,),
        output_args=(activation if stage.head is None else loss,),
        group=grid.pp_group,
    )
