"""Forward and backward of one global batch through a pipeline schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from costmodels import Layout, ModelSpec
from runtime.data_parallel import DTYPES
from runtime.grid import Grid
from runtime.loss import TokenLoss
from runtime.model import Transformer


class Pipeline:
    """Layers spread over pipeline ranks, run by PyTorch's 1F1B or interleaved schedule."""

    def __init__(
        self, stages: list[Transformer], spec: ModelSpec, layout: Layout, grid: Grid, loss: TokenLoss
    ) -> None:
        self.stages = stages
        self.device = grid.device
        self.is_first = any(stage.embedding is not None for stage in stages)
        self.is_last = any(stage.head is not None for stage in stages)
        wrapped = [
            _pipeline_stage(stage, index, spec, layout, grid)
            for stage, index in zip(stages, layout.stages_of(grid.pp_rank), strict=True)
        ]
        options: dict[str, Any] = {
            "n_microbatches": layout.micro_batches,
            "loss_fn": loss,
            "scale_grads": False,
        }
        self.schedule = (
            ScheduleInterleaved1F1B(list(wrapped), **options)
            if layout.schedule == "interleaved"
            else Schedule1F1B(wrapped[0], **options)
        )

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self._run(self.schedule.step, tokens, labels, return_outputs=False)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return self._run(self.schedule.eval, tokens, labels, return_outputs=False)

    def _run(self, step: Any, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
        arguments = (tokens,) if self.is_first else ()
        losses: list[Tensor] = []
        if self.is_last:
            options |= {"target": labels, "losses": losses}
        step(*arguments, **options)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)


def _pipeline_stage(
    stage: Transformer, index: int, spec: ModelSpec, layout: Layout, grid: Grid
) -> PipelineStage:
    """Wrap a stage, with the shapes of its input and output given so that none is sent to find out."""
    batch, seq, tp = layout.micro_batch_size, spec.seq, layout.tensor_parallel
    local_seq = seq // tp if layout.sequence_parallel else seq
    dtype = DTYPES[layout.precision]
    activation = torch.empty(batch, local_seq, spec.hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    logits = torch.empty(batch, seq, spec.padded_vocab(tp) // tp, dtype=dtype, device="meta")
    return PipelineStage(
        stage,
        index,
        len(layout.layers_per_stage),
        grid.device,
        input_args=(activation if stage.embedding is None else tokens,),
        output_args=(activation if stage.head is None else logits,),
        group=grid.pp_group,
    )
