"""Routing of tokens to experts and back: sorting, capacity, grouped GEMMs, without parallelism.

Shapes: see `runtime.model`. A row is a pair of a token and one of its experts; the number of a pair is token
x k + choice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels.pytorch import is_at_least

ALIGNMENT_BYTES = 16
"""Bytes of which matrix rows must be multiples in PyTorch's grouped GEMM."""

GROUPED_MAJORS = (9, 10)
"""Major compute capabilities with kernels for grouped GEMMs; AMD's MI300 and MI350 report 9 too."""


BLACKWELL = 10
"""Compute capability from which the kernels have the fault that `_UsedOnly` corrects."""


class Assignment(NamedTuple):
    """Pairs sorted by expert."""

    order: Tensor
    """Numbers of the pairs: the R kept ones, then the dropped ones."""
    counts: Tensor
    """Rows of each expert, [E]."""
    places: Tensor | None
    """Places of the pairs in `order`; None if pairs may be dropped."""

    def without_dropped(self, rows: int) -> Assignment:
        """The assignment without dropped pairs: only the first `rows`."""
        return Assignment(self.order[:rows], self.counts, None)


def assign(chosen_Tk: Tensor, experts: int) -> Assignment:
    """The pairs of `chosen_Tk` sorted by expert; dropped pairs, with the number `experts`, are last."""
    sorted_R, order = chosen_Tk.flatten().sort(stable=True)
    numbers = torch.arange(max(len(order), experts), device=order.device)
    # Not bincount, which waits for the device.
    ends_E = torch.searchsorted(sorted_R, numbers[:experts], right=True)
    counts_E = ends_E - F.pad(ends_E[:-1], (1, 0))
    places = torch.zeros_like(order).scatter_(0, order, numbers[: len(order)])
    return Assignment(order, counts_E, places)


def row_count(chosen_Tk: Tensor, counts_E: Tensor) -> int:
    """The number of kept pairs of `chosen_Tk`, from `counts_E`; waits for the device."""
    return int(counts_E.sum())


def row_counts(rows_RD: Tensor, counts_E: Tensor) -> list[int]:
    """The values of `counts_E` on the host; waits for the device."""
    sizes: list[int] = counts_E.tolist()
    return sizes


def capacity(seq: int, top_k: int, experts: int, factor: float) -> int:
    """Most tokens of one sequence for an expert: ceil(S k / E x factor)."""
    return math.ceil(seq * top_k / experts * factor)


def capacity_mask(weights_BSk: Tensor, chosen_BSk: Tensor, experts: int, limit: int) -> Tensor:
    """A mask of the pairs within capacity: for each sequence and expert the `limit` largest weights.

    Args:
        weights_BSk: weights of whole sequences.
        chosen_BSk: numbers of experts.
        experts: number of experts.
        limit: most rows of one expert and sequence.

    Returns:
        [B, S, k] booleans; among equal weights the earlier position counts as the larger.
    """
    by_weight = weights_BSk.flatten(1).argsort(dim=1, descending=True, stable=True)
    by_expert = chosen_BSk.flatten(1).gather(1, by_weight).argsort(dim=1, stable=True)
    order = by_weight.gather(1, by_expert)
    sorted_experts = chosen_BSk.flatten(1).gather(1, order)
    counts_BE = torch.zeros(weights_BSk.shape[0], experts, dtype=torch.int64, device=weights_BSk.device)
    counts_BE.scatter_add_(1, sorted_experts, torch.ones_like(sorted_experts))
    starts_BE = counts_BE.cumsum(1) - counts_BE
    places = torch.arange(order.shape[1], device=order.device) - starts_BE.gather(1, sorted_experts)
    kept_BSk = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, places < limit)
    return kept_BSk.view_as(weights_BSk)


class _Permute(torch.autograd.Function):
    """Tokens permuted to the rows of an assignment; backward adds a token's rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, top_k: int, places: Tensor | None) -> Tensor:
        ctx.save_for_backward(order_R if places is None else places)
        ctx.top_k, ctx.tokens, ctx.is_whole = top_k, x_TD.shape[0], places is not None
        return x_TD[order_R // top_k]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        # A gather and the sum over it are one kernel; spread rows are written first.
        number = ctx.tokens * ctx.top_k
        pairs = grad_RD.index_select(0, saved) if ctx.is_whole else spread(grad_RD, saved, number)
        if ctx.top_k > 1:
            pairs = pairs.view(ctx.tokens, ctx.top_k, grad_RD.shape[1]).sum(1)
        return pairs, None, None, None


class _Spread(torch.autograd.Function):
    """Rows copied to their places; unlike index_copy, backward keeps only the places."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(order_R)
        shape = places, rows_RD.shape[1]
        result = rows_RD.new_empty(shape) if len(order_R) == places else rows_RD.new_zeros(shape)
        # Not what the assignment returns: compilers of PyTorch 2.11 take that for a second result.
        result[order_R] = rows_RD
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order_R,) = ctx.saved_tensors
        return grad.index_select(0, order_R), None, None


def spread(rows_RD: Tensor, order_R: Tensor, places: int) -> Tensor:
    """A tensor [places, D] with row i at place order_R[i], and zeros elsewhere."""
    result: Tensor = _Spread.apply(rows_RD, order_R, places)  # type: ignore[no-untyped-call]
    return result


def permute(x_TD: Tensor, order_R: Tensor, top_k: int, places: Tensor | None = None) -> Tensor:
    """Tokens as rows [R, D], sorted by expert.

    Args:
        places: places of the pairs in `order_R`, if all are in it.
    """
    result_RD: Tensor = _Permute.apply(x_TD, order_R, top_k, places)  # type: ignore[no-untyped-call]
    return result_RD


class _Combine(torch.autograd.Function):
    """The weighted sum [T, D] of each token's rows, of which none is dropped.

    Compiled code reads the rows where they are. Backward goes through them once, for both gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_Tk: Tensor, order_R: Tensor, places: Tensor) -> Tensor:
        learns = ctx.needs_input_grad[1]
        ctx.save_for_backward(weights_Tk, order_R, places, *((rows_RD,) if learns else ()))
        weights_Tk, pairs_TkD = weights_Tk.to(rows_RD.dtype), _pairs(rows_RD, weights_Tk, places)
        if not torch.compiler.is_compiling():
            return torch.bmm(weights_Tk.unsqueeze(1), pairs_TkD).squeeze(1)
        result_TD = (pairs_TkD.float() * weights_Tk.float().unsqueeze(-1)).sum(1)
        # Compilers of PyTorch 2.11 lose the gradients of a cast that changes nothing.
        return result_TD if rows_RD.dtype == torch.float32 else result_TD.to(rows_RD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights_Tk, order_R, places, *rows = ctx.saved_tensors
        grad_RD = grad_TD.index_select(0, order_R // weights_Tk.shape[1])
        to_weights = None
        if rows:
            to_weights = _gradient_of_weights(grad_TD, grad_RD, rows[0], weights_Tk, places)
        to_rows = grad_RD * weights_Tk.to(grad_TD.dtype).flatten()[order_R].unsqueeze(1)
        return to_rows, to_weights, None, None


def _gradient_of_weights(
    grad_TD: Tensor, grad_RD: Tensor, rows_RD: Tensor, weights_Tk: Tensor, places: Tensor
) -> Tensor:
    if torch.compiler.is_compiling():
        found_R = (grad_RD.float() * rows_RD.float()).sum(1)
        found_Tk = found_R.index_select(0, places).view_as(weights_Tk)
    else:
        pairs_TkD = _pairs(rows_RD, weights_Tk, places)
        found_Tk = torch.bmm(grad_TD.unsqueeze(1), pairs_TkD.transpose(1, 2)).squeeze(1)
    return found_Tk.to(weights_Tk.dtype)


def _pairs(rows_RD: Tensor, weights_Tk: Tensor, places: Tensor) -> Tensor:
    """The rows of each token, [T, k, D]."""
    return rows_RD.index_select(0, places).view(*weights_Tk.shape, rows_RD.shape[1])


def combine(rows_RD: Tensor, weights_Tk: Tensor, assignment: Assignment) -> Tensor:
    """The weighted sum [T, D] of each token's rows."""
    order_R, places = assignment.order, assignment.places
    if places is not None:
        result_TD: Tensor = _Combine.apply(rows_RD, weights_Tk, order_R, places)  # type: ignore[no-untyped-call]
        return result_TD
    pairs_TkD = spread(rows_RD, order_R, weights_Tk.numel()).view(*weights_Tk.shape, rows_RD.shape[1])
    return torch.bmm(weights_Tk.unsqueeze(1).to(rows_RD.dtype), pairs_TkD).squeeze(1)


class _UsedOnly(torch.autograd.Function):
    """Weights [E, ...] of experts; backward clears the gradients of experts without rows.

    Some kernels leave them uninitialised (github.com/pytorch/pytorch/issues/172439).
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
    x_RI: Tensor,
    weight_EOI: Tensor,
    counts_E: Tensor,
    bias_EO: Tensor | None = None,
    sizes: list[int] | None = None,
) -> Tensor:
    """A linear layer of each expert on its rows.

    Args:
        x_RI: rows sorted by expert.
        weight_EOI: matrices of the experts.
        counts_E: rows of each expert.
        bias_EO: biases of the experts, if any.
        sizes: `counts_E` on the host, if PyTorch's grouped GEMM does not support the operands.

    Returns:
        [R, O]. Even without rows the weights get a zero gradient, as ranks reduce gradients together.
    """
    if not x_RI.shape[0]:
        return F.linear(x_RI, weight_EOI[0], None if bias_EO is None else bias_EO[0])
    if sizes is None:
        if _leaves_garbage(x_RI.device):
            weight_EOI = _UsedOnly.apply(weight_EOI, counts_E)  # type: ignore[no-untyped-call]
        product_RO = F.grouped_mm(
            x_RI, weight_EOI.transpose(1, 2), offs=counts_E.cumsum(0, dtype=torch.int32)
        )
    else:
        parts = torch.split(x_RI, sizes)
        product_RO = torch.cat(
            [F.linear(part, one) for part, one in zip(parts, weight_EOI.unbind(), strict=True)]
        )
    return add_biases(product_RO, bias_EO, counts_E)


def add_biases(product_RO: Tensor, bias_EO: Tensor | None, counts_E: Tensor) -> Tensor:
    """The products of rows with the biases of their experts, if there are any."""
    if bias_EO is None:
        return product_RO
    return product_RO + bias_EO.repeat_interleave(counts_E, dim=0, output_size=product_RO.shape[0])


def major_of(device: torch.device) -> int:
    """The major compute capability of a GPU; compilers treat it as a constant."""
    # Without a GPU tensors are fake, and stand for ones on a GPU of today.
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else GROUPED_MAJORS[0]


def _leaves_garbage(device: torch.device) -> bool:
    """Return whether grouped GEMMs of `device` may leave gradients of experts without rows unwritten."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or major_of(device) >= BLACKWELL


def takes_grouped(dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
    """True if PyTorch's grouped GEMM supports rows and weights of these widths without an internal loop.

    CUDA kernels exist for bf16 on Hopper and data-centre Blackwell; elsewhere PyTorch reads the group sizes
    from the device in every GEMM.
    """
    if any(width * dtype.itemsize % ALIGNMENT_BYTES for width in widths):
        return False
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and major_of(device) in GROUPED_MAJORS


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


KEEPS_PYTHON_NODES = is_at_least("2.13")
"""The PyTorch version before which split-backward schedules lose the gradient of a weight used in a
Function."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """The GEMM [..., N] of `x` [..., K] and `weight` [N, K] in fp32.

    From PyTorch 2.13 on, backward keeps both in their own format.
    """
    if x.dtype == torch.float32 or not KEEPS_PYTHON_NODES:
        return F.linear(x.float(), weight.float())
    result: Tensor = _WideProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class Dispatch(Protocol):
    """Dispatch of tokens to this rank's experts, and of results back."""

    def send(self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Any:
        """Start the dispatch of tokens [T, D] with their weights and experts [T, k]; returns the pending
        state."""

    def receive(self, sent: Any) -> tuple[Tensor, Tensor]:
        """Rows [R, D] sorted by expert, and the counts [E] of this rank's experts."""

    def give_back(self, sent: Any, rows_RD: Tensor) -> Tensor:
        """The weighted sums [T, D] of the experts' results."""


class _Sorted(NamedTuple):
    rows: Tensor
    weights: Tensor
    assignment: Assignment


class LocalDispatch:
    """The dispatch of a rank that has all experts and all tokens."""

    def __init__(self, experts: int, drops: bool) -> None:
        self.experts, self.drops = experts, drops

    def send(self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> _Sorted:
        assignment = assign(chosen_Tk, self.experts)
        if self.drops:
            assignment = assignment.without_dropped(row_count(chosen_Tk, assignment.counts))
        rows_RD = permute(x_TD, assignment.order, chosen_Tk.shape[1], assignment.places)
        return _Sorted(rows_RD, weights_Tk, assignment)

    def receive(self, sent: _Sorted) -> tuple[Tensor, Tensor]:
        return sent.rows, sent.assignment.counts

    def give_back(self, sent: _Sorted, rows_RD: Tensor) -> Tensor:
        return combine(rows_RD, sent.weights, sent.assignment)
