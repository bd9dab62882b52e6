"""Linear layers of experts whose weight gradients are added to sums in fp32 by the grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.experts import Experts
from runtime.model.routing import add_biases, grouped_linear
from runtime.parallel import summing_products  # noqa: F401, defines the operator

WEIGHTS = ("up", "gate", "down")
"""Names of experts' matrices."""


class _Product(torch.autograd.Function):
    """The product of each expert's rows [R, I] with its weight [O, I]; backward adds the weights' gradients
    to a sum."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        ctx.place = place
        if not x_RI.shape[0]:
            return x_RI.new_empty(0, weight_EOI.shape[1])
        return F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_RI, weight_EOI, ends_E = ctx.saved_tensors
        of_place = torch.ops.planner.add_weight_gradient_grouped(grad_RO, x_RI, ends_E, ctx.place)
        of_x = None
        if ctx.needs_input_grad[0]:
            has_rows = x_RI.shape[0] > 0
            of_x = F.grouped_mm(grad_RO, weight_EOI, offs=ends_E) if has_rows else torch.empty_like(x_RI)
        return of_x, None, None, of_place


@cache
def keep_experts_in_graphs() -> None:
    """Let compilers take the product as one operation; loads the compiler."""
    torch.compiler.allow_in_graph(_Product)  # type: ignore[no-untyped-call]


def sum_experts(experts: Experts) -> None:
    """Let the linear layers of experts that have the place of a sum add the gradients of their weights to
    it."""
    experts.linear = _linear(experts)  # type: ignore[method-assign]


def _linear(experts: Experts) -> Callable[..., Tensor]:
    def linear(
        name: str,
        rows: Tensor,
        weight: Tensor,
        counts_E: Tensor,
        bias: Tensor | None,
        sizes: list[int] | None,
    ) -> Tensor:
        place = getattr(experts, f"{name}_place", None)
        if place is None:
            return grouped_linear(rows, weight, counts_E, bias, sizes)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        product: Tensor = _Product.apply(rows, weight, ends_E, place)  # type: ignore[no-untyped-call]
        return add_biases(product, bias, counts_E)

    return linear
