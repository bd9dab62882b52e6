"""Cross entropy over a vocabulary that may be split over ranks and padded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels import Layout, ModelSpec
from runtime.parallel.mesh import Grid


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Sum of token losses from local logits (Megatron-LM, arXiv:1909.08053, section 3).

    Full logits never exist: ranks exchange one maximum, one sum and one target logit for each token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        vocab: int,
        group: dist.ProcessGroup | None,
        ignores: bool,
    ) -> Tensor:
        real = max(0, min(vocab - start, logits.shape[-1]))
        if real:
            highest = logits[..., :real].amax(dim=-1).float()
        else:
            highest = logits.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        exponents = logits[..., :real] - highest.unsqueeze(-1)
        local_targets = targets - start
        foreign = (local_targets < 0) | (local_targets >= real)
        local_targets = local_targets.masked_fill(foreign, 0)
        if real:
            target_scores = exponents.gather(-1, local_targets.unsqueeze(-1)).squeeze(-1)
        else:
            target_scores = torch.zeros_like(highest)
        target_scores = target_scores.masked_fill(foreign, 0.0)
        exponents = exponents.exp_()
        sums = torch.stack((exponents.sum(dim=-1), target_scores))
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponents, sums[0], local_targets, foreign)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.ignored = targets < 0 if ignores else None
        losses = sums[0].log() - sums[1]
        return (losses if ctx.ignored is None else losses.masked_fill(ctx.ignored, 0.0)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exponents, sums, targets, foreign = ctx.saved_tensors
        real = exponents.shape[-1]
        if real:
            # Softmax less one at the target, times `grad`; the only pass over all logits.
            factor = grad / sums
            if ctx.ignored is not None:
                factor = factor.masked_fill(ctx.ignored, 0.0)
            exponents.mul_(factor.unsqueeze(-1))
            del factor
            exponents.scatter_add_(-1, targets.unsqueeze(-1), (~foreign * -grad).unsqueeze(-1))
        if real == ctx.shape[-1]:
            gradient = exponents.to(ctx.dtype)
        else:
            gradient = torch.zeros(ctx.shape, dtype=ctx.dtype, device=exponents.device)
            gradient[..., :real] = exponents
        return gradient, None, None, None, None, None


IGNORED = -100
"""A target that is not predicted (PyTorch's `ignore_index`)."""


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    vocab: int,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    ignores: bool = False,
) -> Tensor:
    """Sum of the cross entropies of all tokens, in nats.

    Args:
        logits: [B, S, V / tp], this rank's slice of the padded vocabulary.
        targets: [B, S], token ids below `vocab`.
        vocab: entries of the tokenizer; logits beyond them take no part.
        start: first vocabulary entry of this rank's slice.
        group: ranks that hold the other slices, None when the slice is the whole vocabulary.
        ignores: whether some targets are `IGNORED`.
    """
    result: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, start, vocab, group, ignores)  # type: ignore[no-untyped-call]
    return result


class TokenLoss:
    """Sum of token losses of a micro batch over the number of tokens of the global batch, times `scale`."""

    scale: float = 1.0
    """Factor of the running step: the loss scale, and the number of tokens where the sum is optimised. The
    trainer sets it and takes it out of what it reports."""

    def __init__(self, spec: ModelSpec, layout: Layout, grid: Grid) -> None:
        tp = layout.tensor_parallel
        self.vocab = spec.vocab
        self.start = grid.tp_rank * (spec.padded_vocab(tp) // tp)
        self.group = grid.mesh.get_group("tp") if tp > 1 else None
        self.tokens = layout.global_batch_size * spec.seq
        """Of the global batch of the running step, which the trainer sets too."""
        self.targets: float | None = None
        """Those of them that are predicted, where some are `IGNORED`; the mean is over these."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        ignores = self.targets is not None
        total = cross_entropy_sum(logits, labels, self.vocab, self.start, self.group, ignores)
        return total / ((self.tokens if self.targets is None else self.targets) / self.scale)
