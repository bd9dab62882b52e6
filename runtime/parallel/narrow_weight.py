"""A place for the weight of a linear layer in 8 bits, from which its GEMMs read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.spec.layout import Fp8Recipe
from runtime.parallel.local_tensors import local_part
from runtime.parallel.summing_linear import summing_linear

TENSORWISE: tuple[Fp8Recipe, ...] = ("default", "tensorwise")
"""Recipes with one scale for all that a rank holds of an operand."""


class NarrowWeight(nn.Module):
    """A weight in 8 bits, in both orientations: GEMMs of the device read rows alone.

    Args:
        linear: the layer, which gets this as its module `narrow`.
        dtype: the format in 8 bits.
    """

    rows: Tensor
    """[N, K]."""
    columns: Tensor
    """[K, N], the transposed rows."""
    scale: Tensor
    """The scale factor of the elements: a 0-d fp32 tensor."""
    inverse: Tensor
    """The reciprocal of the scale factor."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight = local_part(linear.weight.detach())
        for name, shape in (("rows", weight.shape), ("columns", weight.shape[::-1])):
            self.register_buffer(name, weight.new_zeros(shape, dtype=dtype), persistent=False)
        for name in ("scale", "inverse"):
            self.register_buffer(name, weight.new_ones((), dtype=torch.float32), persistent=False)
        self.sizes = [one.untyped_storage().nbytes() for one in (self.rows, self.columns)]
        linear.narrow = self

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors in the order in which a tensor-wise product takes them."""
        return self.rows, self.columns, self.scale, self.inverse

    def take_memory(self) -> None:
        """Have memory for the elements."""
        for one, size in zip((self.rows, self.columns), self.sizes, strict=True):
            # To the same size it would move, too.
            if one.untyped_storage().nbytes() != size:
                one.untyped_storage().resize_(size)

    def free(self) -> None:
        """Give the memory of the elements back."""
        for one in (self.rows, self.columns):
            one.untyped_storage().resize_(0)


def multiply(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The GEMM of a linear layer by its `product`, which reads the weight in 8 bits where it is there.

    Where the layer has the place of a sum, the GEMM of the weight's gradient adds to it.
    """
    result: Tensor
    own, narrow = linear.__dict__, getattr(linear, "narrow", None)
    is_plain = "product" not in own or own["product"] is F.linear
    if is_plain and "place" in own:
        result = summing_linear(x, weight, bias, own["place"])
    else:
        further: dict[str, Any] = {} if narrow is None else {"narrow": narrow.parts}
        if "place" in own:
            further["place"] = own["place"]
        result = own["product"](x, weight, bias, **further)
    return result


def use_multiply(linear: nn.Linear) -> None:
    """Let the forward pass of a linear layer multiply by `multiply`, unless it has a forward of its own."""
    if "forward" not in linear.__dict__:
        linear.forward = _forward(linear)  # type: ignore[assignment,method-assign]


def _forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: multiply(linear, x, linear.weight, linear.bias)
