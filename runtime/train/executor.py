"""Forward and backward of one global batch, with gradient accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from costmodels import Layout
from runtime.faults.heartbeat import set_operation
from runtime.model.transformer import Transformer
from runtime.parallel.documents import Documents
from runtime.parallel.graphed_pass import GraphedPass
from runtime.parallel.loss import TokenLoss
from runtime.parallel.working_copies import WorkingCopies, computing

if TYPE_CHECKING:
    from runtime.parallel.float8_gather import Float8Gather


class Executor(Protocol):
    """An executor of one data-parallel rank's microbatches of a step."""

    stages: list[Transformer]
    loss: TokenLoss
    copies: list[WorkingCopies]
    """Working copies of the stages' parameters, where FSDP2 does not wrap them."""
    float8_gather: Float8Gather | None
    """Weights that FSDP2 gathers in 8 bits, if any; ranks agree on the scales before each step."""
    graphed: GraphedPass | None
    """Passes as a CUDA graph; None without graphs."""

    def use_documents(self, documents: Documents) -> None:
        """Let `documents` prepare the stages before each pass of a microbatch."""

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Accumulate the gradients of a batch.

        Args:
            tokens: [microbatches x B, S] token ids, with a number of microbatches that the layout can run.
            labels: the same shape, the ids to predict.

        Returns:
            This rank's part of the mean token loss of the global batch; zero on stages other than the last.
        """

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """This rank's part of the loss, without gradients."""


class Accumulation:
    """An executor with all layers on every rank, which runs microbatches one after the other."""

    float8_gather: Float8Gather | None = None

    def __init__(
        self, stages: list[Transformer], layout: Layout, loss: TokenLoss, copies: list[WorkingCopies]
    ) -> None:
        self.stages, self.copies = stages, copies
        self.loss = loss
        loss.score(stages[0])
        self.micro_batch_size = layout.micro_batch_size
        self.documents: Documents | None = None
        # ZeRO 3 reduces after every microbatch, so that whole gradients never pile up.
        self.defer_reduction = layout.zero_stage < 3
        self.graphed: GraphedPass | None = None
        if layout.cuda_graphs:
            for own in copies:
                own.stay()
            loss.stay()
            self.graphed = GraphedPass(self._pass, loss.device)

    def use_documents(self, documents: Documents) -> None:
        self.documents = documents

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.loss.begin_step()
        with computing(self.copies):
            return self._train(tokens, labels)

    def _train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        model = self.stages[0]
        total = torch.zeros((), device=tokens.device)
        micro_batches = self._micro_batches(tokens, labels)
        for number, (x, y) in enumerate(micro_batches, start=1):
            if isinstance(model, FSDPModule) and self.defer_reduction:
                last = number == len(micro_batches)
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            set_operation("forward", number)
            if self.graphed is not None:
                total += self.graphed(x, y)
                continue
            self._enter(number)
            self.loss.labels = y
            loss = model(x)
            set_operation("backward", number)
            if number == len(micro_batches):
                for copies in self.copies:
                    copies.reduce_next()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.loss.labels = None
        return total

    def _pass(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward of a microbatch; gradients are reduced after the last microbatch."""
        self.loss.labels = labels
        loss: Tensor = self.stages[0](tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.loss.begin_step()
        with computing(self.copies):
            return self._evaluate(tokens, labels)

    def _evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        model = self.stages[0]
        total = torch.zeros((), device=tokens.device)
        for number, (x, y) in enumerate(self._micro_batches(tokens, labels), start=1):
            set_operation("forward", number)
            self._enter(number)
            self.loss.labels = y
            total += model(x)
        self.loss.labels = None
        return total

    def _enter(self, number: int) -> None:
        if self.documents is not None:
            self.documents.enter(self.stages[0], number - 1)

    def _micro_batches(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, ...]]:
        size = self.micro_batch_size
        return list(zip(torch.split(tokens, size), torch.split(labels, size), strict=True))
