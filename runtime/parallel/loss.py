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
        logits_BSV: Tensor,
        targets_BS: Tensor,
        start: int,
        vocab: int,
        group: dist.ProcessGroup | None,
        ignores: bool,
    ) -> Tensor:
        real = max(0, min(vocab - start, logits_BSV.shape[-1]))
        if real:
            highest_BS = logits_BSV[..., :real].amax(dim=-1).float()
        else:
            highest_BS = logits_BSV.new_full(targets_BS.shape, -torch.inf, dtype=torch.float32)
        if group is not None:
            dist.all_reduce(highest_BS, dist.ReduceOp.MAX, group)
        exponents_BSV = logits_BSV[..., :real] - highest_BS.unsqueeze(-1)
        local_targets_BS = targets_BS - start
        foreign_BS = (local_targets_BS < 0) | (local_targets_BS >= real)
        local_targets_BS = local_targets_BS.masked_fill(foreign_BS, 0)
        if real:
            target_scores_BS = exponents_BSV.gather(-1, local_targets_BS.unsqueeze(-1)).squeeze(-1)
        else:
            target_scores_BS = torch.zeros_like(highest_BS)
        target_scores_BS = target_scores_BS.masked_fill(foreign_BS, 0.0)
        exponents_BSV = exponents_BSV.exp_()
        sums_2BS = torch.stack((exponents_BSV.sum(dim=-1), target_scores_BS))
        if group is not None:
            dist.all_reduce(sums_2BS, group=group)
        ctx.save_for_backward(exponents_BSV, sums_2BS[0], local_targets_BS, foreign_BS)
        ctx.shape, ctx.dtype = logits_BSV.shape, logits_BSV.dtype
        ctx.ignored = targets_BS < 0 if ignores else None
        losses_BS = sums_2BS[0].log() - sums_2BS[1]
        return (losses_BS if ctx.ignored is None else losses_BS.masked_fill(ctx.ignored, 0.0)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exponents_BSV, sums_BS, targets_BS, foreign_BS = ctx.saved_tensors
        real = exponents_BSV.shape[-1]
        if real:
            # Softmax less one at the target, times `grad`; the only pass over all logits.
            factor_BS = grad / sums_BS
            if ctx.ignored is not None:
                factor_BS = factor_BS.masked_fill(ctx.ignored, 0.0)
            exponents_BSV.mul_(factor_BS.unsqueeze(-1))
            del factor_BS
            exponents_BSV.scatter_add_(-1, targets_BS.unsqueeze(-1), (~foreign_BS * -grad).unsqueeze(-1))
        if real == ctx.shape[-1]:
            gradient_BSV = exponents_BSV.to(ctx.dtype)
        else:
            gradient_BSV = torch.zeros(ctx.shape, dtype=ctx.dtype, device=exponents_BSV.device)
            gradient_BSV[..., :real] = exponents_BSV
        return gradient_BSV, None, None, None, None, None


IGNORED_TARGET = -100
"""A target that is not predicted (PyTorch's `ignore_index`)."""


def cross_entropy_sum(
    logits_BSV: Tensor,
    targets_BS: Tensor,
    vocab: int,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    ignores: bool = False,
) -> Tensor:
    """Sum of the cross entropies of all tokens, in nats.

    Args:
        logits_BSV: this rank's slice of the padded vocabulary.
        targets_BS: token ids below `vocab`.
        vocab: entries of the tokenizer; logits beyond them take no part.
        start: first vocabulary entry of this rank's slice.
        group: ranks that hold the other slices, None when the slice is the whole vocabulary.
        ignores: whether some targets are `IGNORED_TARGET`.
    """
    result: Tensor = _VocabParallelCrossEntropy.apply(logits_BSV, targets_BS, start, vocab, group, ignores)  # type: ignore[no-untyped-call]
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
        """Those of them that are predicted, where some are `IGNORED_TARGET`; the mean is over these."""

    def __call__(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        ignores = self.targets is not None
        total = cross_entropy_sum(logits_BSV, labels_BS, self.vocab, self.start, self.group, ignores)
        return total / ((self.tokens if self.targets is None else self.targets) / self.scale)
