"""Tokens to experts and back: sorting, capacity, grouped products. No parallelism.

Shapes: T tokens, k experts of each token, E experts, R rows: pairs of a token and one of its experts, which
are numbered token x k + choice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT_BYTES = 16
"""What rows of matrices must be multiples of in PyTorch's grouped product."""

GROUPED_MAJORS = (9, 10)
"""Compute capabilities that its kernels are made for; AMD's MI300 and MI350 report 9 too."""


BLACKWELL = 10
"""Compute capability from which the kernels have the fault that `_UsedOnly` mends."""


class Assignment(NamedTuple):
    """Rows in the order of their experts."""

    order: Tensor
    """Numbers of the pairs: the R that experts take in, then those that are dropped."""
    counts: Tensor
    """[E] rows of each expert."""

    def kept(self, rows: int) -> Assignment:
        """The same without the dropped pairs, when `rows` are left."""
        return Assignment(self.order[:rows], self.counts)


def assign(chosen: Tensor, experts: int) -> Assignment:
    """Sort the pairs of `chosen` [T, k] by expert; those with the number `experts` are dropped and last."""
    flat = chosen.flatten()
    # Not bincount, which waits for the device.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return Assignment(flat.argsort(stable=True), counts[:experts])


def rows_taken_in(chosen: Tensor, counts: Tensor) -> int:
    """How many of the pairs `chosen` experts take in, by `counts` [E]; waits for the device."""
    return int(counts.sum())


def rows_of_each(rows: Tensor, counts: Tensor) -> list[int]:
    """`counts` [E] of sorted rows [R, D] as numbers of the host; waits for the device."""
    sizes: list[int] = counts.tolist()
    return sizes


def capacity(seq: int, top_k: int, experts: int, factor: float) -> int:
    """Tokens of one sequence that an expert takes in at most: ceil(S k / E x factor)."""
    return math.ceil(seq * top_k / experts * factor)


def within_capacity(weights: Tensor, chosen: Tensor, experts: int, limit: int) -> Tensor:
    """Which pairs the experts take in: of each sequence and expert the `limit` largest weights.

    Args:
        weights: [B, S, k], whole sequences.
        chosen: [B, S, k] numbers of experts.
        experts: how many there are.
        limit: rows of one expert and sequence.

    Returns:
        [B, S, k] booleans; of equal weights the earlier position counts as the larger.
    """
    by_weight = weights.flatten(1).argsort(dim=1, descending=True, stable=True)
    by_expert = chosen.flatten(1).gather(1, by_weight).argsort(dim=1, stable=True)
    order = by_weight.gather(1, by_expert)
    sorted_experts = chosen.flatten(1).gather(1, order)
    counts = torch.zeros(weights.shape[0], experts, dtype=torch.int64, device=weights.device)
    counts.scatter_add_(1, sorted_experts, torch.ones_like(sorted_experts))
    starts = counts.cumsum(1) - counts
    places = torch.arange(order.shape[1], device=order.device) - starts.gather(1, sorted_experts)
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, places < limit)
    return kept.view_as(weights)


class _Permute(torch.autograd.Function):
    """Rows of tokens in the order of an assignment; backward adds up a token's rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k, ctx.tokens = top_k, x.shape[0]
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        pairs = spread(grad, order, ctx.tokens * ctx.top_k)
        if ctx.top_k == 1:
            return pairs, None, None
        return pairs.view(ctx.tokens, ctx.top_k, grad.shape[1]).sum(1), None, None


class _Spread(torch.autograd.Function):
    """Rows at their places; unlike index_copy's own, backward keeps the places only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(order)
        shape = places, rows.shape[1]
        result = rows.new_empty(shape) if len(order) == places else rows.new_zeros(shape)
        return result.index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def spread(rows: Tensor, order: Tensor, places: int) -> Tensor:
    """[places, D] with row i of [R, D] at place order[i], and zeros where none belongs."""
    result: Tensor = _Spread.apply(rows, order, places)  # type: ignore[no-untyped-call]
    return result


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Tokens [T, D] as rows [R, D], sorted by expert."""
    result: Tensor = _Permute.apply(x, order, top_k)  # type: ignore[no-untyped-call]
    return result


def combine(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sum [T, D] of each token's rows [R, D]; `weights` is [T, k]."""
    pairs = spread(rows, order, weights.numel()).view(*weights.shape, rows.shape[1])
    return torch.bmm(weights.unsqueeze(1).to(rows.dtype), pairs).squeeze(1)


class _UsedOnly(torch.autograd.Function):
    """Weights [E, ...] of experts; backward clears the gradients of those without rows.

    Some kernels leave what was in memory there (github.com/pytorch/pytorch/issues/172439).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        return grad.masked_fill((counts == 0).view(-1, 1, 1), 0.0), None


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, sizes: list[int] | None = None
) -> Tensor:
    """A linear layer of each expert on its rows.

    Args:
        x: [R, K] rows sorted by expert.
        weight: [E, N, K].
        counts: [E] rows of each expert.
        bias: [E, N] or None.
        sizes: `counts` on the host, where PyTorch's grouped product does not take the operands.

    Returns:
        [R, N]. Without rows too the weights get a gradient, of zeros: ranks reduce gradients together.
    """
    if not x.shape[0]:
        return F.linear(x, weight[0], None if bias is None else bias[0])
    if sizes is None:
        if _leaves_garbage(x.device):
            weight = _UsedOnly.apply(weight, counts)  # type: ignore[no-untyped-call]
        product = F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    else:
        parts = torch.split(x, sizes)
        product = torch.cat([F.linear(part, one) for part, one in zip(parts, weight.unbind(), strict=True)])
    if bias is None:
        return product
    return product + bias.repeat_interleave(counts, dim=0, output_size=x.shape[0])


def _leaves_garbage(device: torch.device) -> bool:
    """Whether grouped products of `device` may not write the gradients of weights without rows."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= BLACKWELL


def takes_grouped(x: Tensor, *widths: int) -> bool:
    """Whether PyTorch's grouped product takes `x` and weights of these widths, without a loop of its own.

    CUDA kernels are made for bf16 on Hopper and data-centre Blackwell; elsewhere PyTorch asks the device for
    the sizes of groups in every product.
    """
    if any(width * x.element_size() % ALIGNMENT_BYTES for width in widths):
        return False
    if x.device.type != "cuda":
        return True
    if x.dtype != torch.bfloat16:
        return False
    # Without a GPU these are fake tensors, which stand for ones on a GPU of today.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(x.device)[0] in GROUPED_MAJORS


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        to_weight = grad.flatten(0, -2).T @ x.flatten(0, -2).float()
        return (grad @ weight.float()).to(x.dtype), to_weight.to(weight.dtype)


KEEPS_PYTHON_NODES = torch.__version__ >= "2.13"
"""Before, schedules that split backward lose the gradient of a weight that a Function takes."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """The product [..., N] of `x` [..., K] and `weight` [N, K] in fp32.

    Backward keeps both in the format that they have, from PyTorch 2.13 on.
    """
    if x.dtype == torch.float32 or not KEEPS_PYTHON_NODES:
        return F.linear(x.float(), weight.float())
    result: Tensor = _WideProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class Dispatch(Protocol):
    """Carries tokens to the experts that work here, and their results back."""

    def send(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Any:
        """Start with tokens [T, D], and the weights and experts [T, k] of each; returns what is under way."""

    def receive(self, sent: Any) -> tuple[Tensor, Tensor]:
        """Rows [R, D] sorted by expert, and the counts [E] of each expert that works here."""

    def give_back(self, sent: Any, rows: Tensor) -> Tensor:
        """The weighted sums [T, D] of the experts' results `rows` [R, D]."""


class _Sorted(NamedTuple):
    rows: Tensor
    weights: Tensor
    assignment: Assignment


class LocalDispatch:
    """All experts and all tokens are here."""

    def __init__(self, experts: int, drops: bool) -> None:
        self.experts, self.drops = experts, drops

    def send(self, x: Tensor, weights: Tensor, chosen: Tensor) -> _Sorted:
        assignment = assign(chosen, self.experts)
        if self.drops:
            assignment = assignment.kept(rows_taken_in(chosen, assignment.counts))
        return _Sorted(permute(x, assignment.order, chosen.shape[1]), weights, assignment)

    def receive(self, sent: _Sorted) -> tuple[Tensor, Tensor]:
        return sent.rows, sent.assignment.counts

    def give_back(self, sent: _Sorted, rows: Tensor) -> Tensor:
        return combine(rows, sent.weights, sent.assignment.order)
