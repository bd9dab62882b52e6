"""Forward and backward of one global batch: gradient accumulation, or a pipeline schedule."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from costmodels import Layout, ModelSpec
from runtime.grid import Grid
from runtime.initialise import INIT_STD, initialise
from runtime.loss import cross_entropy_sum
from runtime.model import Transformer
from runtime.parallelize import DTYPES, data_parallel, needs_data_parallel, tensor_parallel
from runtime.preflight import check_job


class Executor(Protocol):
    """Runs the micro batches that one data-parallel rank owes to a step."""

    stages: list[Transformer]

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Accumulate the gradients of a batch.

        Args:
            tokens: [micro batches x B, S] token ids.
            labels: the same shape, the ids to predict.

        Returns:
            This rank's part of the mean token loss of the global batch; zero off the last stage.
        """

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The same part of the loss, without gradients."""


def build_executor(
    spec: ModelSpec, layout: Layout, grid: Grid, seed: int, init_std: float = INIT_STD
) -> Executor:
    """Build, split and initialise the stages of this rank.

    Weights are drawn after splitting, into memory that holds this rank's part only.
    """
    check_job(spec, layout, dist.get_world_size())
    stages = []
    for index in layout.stages_of(grid.pp_rank):
        with torch.device("meta"):
            stage = Transformer(
                spec,
                spec.padded_vocab(layout.tensor_parallel),
                layout.layer_range(index),
                with_embedding=index == 0,
                with_head=index == len(layout.layers_per_stage) - 1,
                recompute=layout.recompute,
            )
        if layout.tensor_parallel > 1:
            tensor_parallel(stage, grid.mesh["tp"], layout.sequence_parallel)
        if needs_data_parallel(layout):
            data_parallel(stage, layout, grid)
        stage.to_empty(device=grid.device)
        stage.tie()
        initialise(stage, spec, seed, init_std)
        if isinstance(stage, FSDPModule):
            _settle_shards(stage)
        stages.append(stage)
    loss = TokenLoss(spec, layout, grid)
    if layout.pipeline_parallel == 1:
        return Accumulation(stages, layout, loss)
    return Pipeline(stages, spec, layout, grid, loss)


def _settle_shards(stage: Transformer) -> None:
    """Gather and free once: FSDP2 moves uneven shards into padded storage on first use only."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


class TokenLoss:
    """Sum of token losses of a micro batch over the number of tokens of the global batch."""

    def __init__(self, spec: ModelSpec, layout: Layout, grid: Grid) -> None:
        tp = layout.tensor_parallel
        self.vocab = spec.vocab
        self.start = grid.tp_rank * (spec.padded_vocab(tp) // tp)
        self.group = grid.mesh.get_group("tp") if tp > 1 else None
        self.tokens = layout.global_batch_size * spec.seq

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_sum(logits, labels, self.vocab, self.start, self.group) / self.tokens


class Accumulation:
    """All layers on every rank: micro batches one after the other."""

    def __init__(self, stages: list[Transformer], layout: Layout, loss: TokenLoss) -> None:
        self.stages = stages
        self.loss = loss
        self.micro_batch_size = layout.micro_batch_size
        # ZeRO 3 reduces after every micro batch, so that whole gradients never pile up.
        self.defer_reduction = layout.zero_stage < 3

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        model = self.stages[0]
        total = torch.zeros((), device=tokens.device)
        micro_batches = self._micro_batches(tokens, labels)
        for number, (x, y) in enumerate(micro_batches, start=1):
            if isinstance(model, FSDPModule) and self.defer_reduction:
                last = number == len(micro_batches)
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            loss = self.loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        model = self.stages[0]
        total = torch.zeros((), device=tokens.device)
        for x, y in self._micro_batches(tokens, labels):
            total += self.loss(model(x), y)
        return total

    def _micro_batches(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, ...]]:
        size = self.micro_batch_size
        return list(zip(torch.split(tokens, size), torch.split(labels, size), strict=True))


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
