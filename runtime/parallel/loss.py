"""Cross entropy together with the head's GEMM, over a vocabulary that may be split over ranks and padded.

All logits never exist at once. One chunk of tokens at a time is multiplied by the output matrix and scored,
and its logits are overwritten by the gradient. This gives the gradients of the chunk's tokens and a part of
the matrix gradient. So forward does the three GEMMs of a head, and backward only returns the gradients.
Shapes: see `runtime.model`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costmodels import Layout, ModelSpec
from costmodels.layers.shapes import loss_chunks
from runtime.model.transformer import Transformer
from runtime.parallel.collectives import all_reduce
from runtime.parallel.mesh import Grid
from runtime.parallel.tensor import local_weight


class Vocabulary(NamedTuple):
    """This rank's part of the entries of the output matrix."""

    size: int
    """Entries of the tokenizer; further rows are padding and are ignored."""
    start: int = 0
    """The first entry of this rank."""
    group: dist.ProcessGroup | None = None
    """Ranks that have the other parts; None where there are none."""

    @property
    def ranks(self) -> int:
        """The number of ranks that split the vocabulary."""
        return 1 if self.group is None else self.group.size()


Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of logits [T, V], which it may overwrite, targets [T] and a factor []. It returns the sum of the
losses, without the factor, and the gradient of the logits, with the factor."""


def eager_scores(
    vocabulary: Vocabulary, logits_TV: Tensor, targets_T: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and gradient by single PyTorch operators with little memory.

    Ranks that split the vocabulary exchange one maximum, one sum and one target logit for each token
    (Megatron-LM, arXiv:1909.08053, section 3).
    """
    size, start, group = vocabulary
    real = max(0, min(size - start, logits_TV.shape[-1]))
    exponents_TV, foreign_T = logits_TV[:, :real], (targets_T < start) | (targets_T >= start + real)
    if real:
        highest_T = exponents_TV.amax(dim=-1).float()
    else:
        highest_T = logits_TV.new_full(targets_T.shape, -torch.inf, dtype=torch.float32)
    if group is not None:
        highest_T = all_reduce(highest_T, "max", group.group_name)
    if logits_TV.dtype == torch.float32:
        exponents_TV.sub_(highest_T.unsqueeze(-1))
    else:
        exponents_TV = exponents_TV - highest_T.unsqueeze(-1)
    places_T1 = (targets_T - start).masked_fill(foreign_T, 0).unsqueeze(-1)
    chosen_T = exponents_TV.gather(-1, places_T1).squeeze(-1) if real else torch.zeros_like(highest_T)
    chosen_T = chosen_T.masked_fill(foreign_T, 0.0)
    sums_2T = torch.stack((exponents_TV.exp_().sum(dim=-1), chosen_T))
    if group is not None:
        sums_2T = all_reduce(sums_2T, "sum", group.group_name)
    losses_T, factors_T = _of_predicted(sums_2T[0].log() - sums_2T[1], targets_T, factor)
    exponents_TV.mul_((factors_T / sums_2T[0]).unsqueeze(-1))
    if real:
        exponents_TV.scatter_add_(-1, places_T1, (~foreign_T * -factors_T).unsqueeze(-1))
    if logits_TV.dtype != torch.float32:
        logits_TV[:, :real] = exponents_TV
    if real < logits_TV.shape[-1]:
        logits_TV[:, real:] = 0.0
    return losses_T.sum(), logits_TV


def fusible_scores(
    vocabulary: Vocabulary, logits_TV: Tensor, targets_T: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in a form that compilers fuse into a few kernels."""
    size, start, group = vocabulary
    places_V = torch.arange(start, start + logits_TV.shape[-1], device=logits_TV.device)
    scores_TV = logits_TV.float()
    if size < start + logits_TV.shape[-1]:
        scores_TV = scores_TV.masked_fill(places_V >= size, -torch.inf)
    highest_T = scores_TV.amax(dim=-1)
    if group is not None:
        highest_T = all_reduce(highest_T, "max", group.group_name)
    shifted_TV = scores_TV - highest_T.unsqueeze(-1)
    is_target_TV = places_V == targets_T.unsqueeze(-1)
    exponents_TV = shifted_TV.exp()
    chosen_T = torch.where(is_target_TV, shifted_TV, 0.0).sum(dim=-1)
    sums_2T = torch.stack((exponents_TV.sum(dim=-1), chosen_T))
    if group is not None:
        sums_2T = all_reduce(sums_2T, "sum", group.group_name)
    losses_T, factors_T = _of_predicted(sums_2T[0].log() - sums_2T[1], targets_T, factor)
    shares_TV = exponents_TV * (factors_T / sums_2T[0]).unsqueeze(-1)
    gradient_TV = shares_TV - torch.where(is_target_TV, factors_T.unsqueeze(-1), 0.0)
    return losses_T.sum(), gradient_TV.to(logits_TV.dtype)


def capped(scores: Scores, softcap: float) -> Scores:
    """`scores` for logits x that are first capped to softcap tanh(x / softcap) (Gemma 2)."""

    def of_bounded(logits_TV: Tensor, targets_T: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        bounded_TV = torch.tanh(logits_TV / softcap)
        loss, gradient_TV = scores(bounded_TV * softcap, targets_T, factor)
        return loss, gradient_TV * (1.0 - bounded_TV.square())

    return of_bounded


def _of_predicted(losses_T: Tensor, targets_T: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and factors of their gradients; zero for tokens that are not predicted."""
    ignored_T = targets_T < 0
    return losses_T.masked_fill(ignored_T, 0.0), factor.expand_as(losses_T).masked_fill(ignored_T, 0.0)


def ids_of(targets: Tensor) -> Tensor:
    """The ids of targets, including targets that are not predicted."""
    return torch.where(targets < 0, ~targets, targets)


class _HandOver(torch.autograd.Function):
    """`value` with an already computed gradient for `source`."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # Not held any longer: autograd takes what nobody else holds for the gradient without a copy.
        gradient, ctx.gradient = ctx.gradient, None
        gradient.mul_(grad)
        return gradient, None, None


def head_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    vocabulary: Vocabulary,
    factor: float | Tensor = 1.0,
    scores: Scores | None = None,
) -> Tensor:
    """The sum of the cross entropies of all tokens that are predicted, in nats, times `factor`.

    Args:
        x_BSD: input of the output matrix.
        weight_VD: this rank's rows of the matrix, padding included.
        targets_BS: ids of tokens; negative for tokens that are not predicted.
        scores: loss function of a chunk of tokens; `eager_scores` of the vocabulary when not given.
    """
    with torch.no_grad():
        value, x_gradient_TD, weight_gradient_VD = _chunk_by_chunk(
            x_BSD.flatten(0, 1),
            weight_VD,
            targets_BS.flatten(),
            int(loss_chunks(targets_BS.numel(), vocabulary.ranks)),
            factor if isinstance(factor, Tensor) else torch.full((), factor, device=x_BSD.device),
            scores or partial(eager_scores, vocabulary),
            with_gradients=x_BSD.requires_grad or weight_VD.requires_grad,
            is_frozen=not weight_VD.requires_grad,
        )
    if x_gradient_TD is None:
        return value
    # Apart, so that a schedule may ask for gradients of inputs and of weights one after the other.
    loss: Tensor = _HandOver.apply(x_BSD, value, x_gradient_TD.view_as(x_BSD))  # type: ignore[no-untyped-call]
    if weight_gradient_VD is None:
        # Pipelines detach what they get, which a view cannot be.
        return loss.clone()
    of_weight: Tensor = _HandOver.apply(weight_VD, value.new_zeros(()), weight_gradient_VD)  # type: ignore[no-untyped-call]
    return loss + of_weight


def _chunk_by_chunk(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    chunks: int,
    factor: Tensor,
    scores: Scores,
    with_gradients: bool,
    is_frozen: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss times factor, and its gradients for `x_TD` and for `weight_VD` unless that is frozen."""
    total = torch.zeros_like(factor)
    x_gradient_TD = torch.empty_like(x_TD) if with_gradients else None
    weight_gradient_VD: Tensor | None = None
    rows = len(x_TD) // chunks
    for number in range(chunks):
        here = slice(number * rows, (number + 1) * rows)
        logits_TV = x_TD[here] @ weight_VD.t()
        loss, gradient_TV = scores(logits_TV, targets_T[here], factor)
        del logits_TV
        total += loss
        if x_gradient_TD is not None:
            torch.mm(gradient_TV, weight_VD, out=x_gradient_TD[here])
            if not is_frozen:
                weight_gradient_VD = add_product(weight_gradient_VD, gradient_TV, x_TD[here])
        del gradient_TV
    return total.mul_(factor), x_gradient_TD, weight_gradient_VD


def add_product(total_VD: Tensor | None, gradient_TV: Tensor, x_TD: Tensor) -> Tensor:
    """The matrix gradient with one more chunk of tokens added by the GEMM."""
    if total_VD is None:
        return gradient_TV.t() @ x_TD
    return total_VD.addmm_(gradient_TV.t(), x_TD)


class TokenLoss:
    """Sum of token losses of a microbatch over the number of tokens of the global batch, times `scale`."""

    scale: float = 1.0
    """Factor of the current step: the loss scale, and the number of tokens if the sum is optimised. The
    trainer sets it and removes it from reported losses."""

    def __init__(self, spec: ModelSpec, layout: Layout, grid: Grid, compiled: bool = False) -> None:
        tp = layout.tensor_parallel
        start = grid.tp_rank * (spec.padded_vocab(tp) // tp)
        self.vocabulary = Vocabulary(spec.vocab, start, grid.mesh.get_group("tp") if tp > 1 else None)
        self.scores: Scores = partial(fusible_scores if compiled else eager_scores, self.vocabulary)
        if spec.logits_softcap:
            self.scores = capped(self.scores, spec.logits_softcap)
        if compiled:
            self.scores = torch.compile(self.scores)
        self.tokens = layout.global_batch_size * spec.seq
        """Tokens of the global batch of the running step, which the trainer sets too."""
        self.targets: tuple[float, ...] | None = None
        """Predicted tokens of the global batch at each depth, for the mean; None if all are predicted."""
        self.labels: Tensor | None = None
        """Labels of the next microbatch, which the executor sets: [B, S], or [B, 1 + depths, S] with MTP."""
        self.depths = spec.mtp_depths
        self.further_factor = 0.0 if spec.mtp is None else spec.mtp.loss_factor / spec.mtp.depths
        self.seq = spec.seq
        self.device = grid.device
        self.factors: Tensor | None = None
        """Factors of the losses at each depth, [1 + depths], where passes read them on the device."""
        self.further_losses: Tensor | None = None
        """This rank's part of the mean loss of each depth in the running step, times `scale`, [depths]. The
        trainer sets it to zero where there are depths."""

    def stay(self) -> None:
        """Keep values that change in each step at a fixed address on the device from now on."""
        self.factors = torch.empty(1 + self.depths, device=self.device)

    def begin_step(self) -> None:
        """Copy the next step's values to the device, if passes read them there."""
        if self.factors is not None:
            for depth, factor in enumerate(self.factors):
                factor.fill_(self._factor(depth))

    def score(self, stage: Transformer) -> None:
        """Let `stage` return losses instead of logits, if it has a head."""
        stage.score = self

    def __call__(self, head: nn.Linear, x_BSD: Tensor, depth: int = 0) -> Tensor:
        """The loss of a microbatch, [], from the input of the head; for an MTP depth, weighted for the
        objective."""
        entry = getattr(head, "entry", None)
        if entry is not None:
            x_BSD = entry(x_BSD)
        factor = self._factor(depth) if self.factors is None else self.factors[depth]
        labels_BS, weight_VD = self._labels(depth), local_weight(head.weight)
        loss = head_loss(x_BSD, weight_VD, labels_BS, self.vocabulary, factor, self.scores)
        if depth:
            if self.further_losses is not None:
                self.further_losses[depth - 1] += loss.detach()
            loss = loss * self.further_factor
        return loss

    def further(self, depth: int) -> Tensor:
        """Ids [B, S] of the tokens `depth` positions later, which are the targets of the previous depth."""
        return ids_of(self._labels(depth - 1))

    def _labels(self, depth: int) -> Tensor:
        assert self.labels is not None
        return self.labels[:, depth] if self.depths else self.labels

    def _factor(self, depth: int) -> float:
        return self.scale / self.predicted(depth)

    def predicted(self, depth: int) -> float:
        """Number of predicted tokens of the global batch at a depth; the loss is the mean over these."""
        if self.targets is not None:
            return self.targets[depth]
        # The last tokens of a sequence have none so far on.
        return self.tokens * (self.seq - depth) / self.seq if depth else self.tokens
