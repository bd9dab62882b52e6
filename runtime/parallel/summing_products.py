"""Weight-gradient GEMMs of experts, and of operands in 8 bits, that add to sums in fp32.

PyTorch's GEMMs add to sums in 16 bits alone (`runtime.parallel.summing_linear`). On NVIDIA's GPUs, Triton
kernels add here (`runtime.parallel.summing_kernels`), if they are right and no slower than a GEMM and an
addition (`runtime.parallel.summing_trial`). On a CPU, the gradient is rounded to 16 bits and then added, bit
for bit as by separate operations; only tests do so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.parallel.summing_linear import place_of

chosen: dict[str, Any] = {}
"""Tiles of the kernels, by their name, that were the fastest on this rank's device."""

GROUPED, SCALED = "add_weight_gradient_grouped", "add_weight_gradient_scaled"
"""Names of the operators, which begin as that of GEMMs in 16 bits."""

_library: Any = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
# Kernels take any strides. But those of eager code, whose rows are dense, are the fast ones.
for _schema in (
    f"{GROUPED}(Tensor gradient, Tensor x, Tensor ends, Tensor place) -> Tensor",
    f"{SCALED}(Tensor gradient, Tensor x, Tensor gradient_scale, Tensor x_scale, ScalarType dtype, "
    "Tensor place) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


def add_grouped_product(
    sum_EOI: Tensor, holds: bool, left_RO: Tensor, right_RI: Tensor, ends_E: Tensor, tiles: Any = None
) -> None:
    """Add the products of the rows of each expert to its sum, or write them if nothing is there yet.

    Args:
        ends_E: numbers of the rows after the last one of each expert, which stay on the device.
        tiles: tiles of a GPU's kernel; the chosen ones when not given.
    """
    if sum_EOI.is_cuda:
        from runtime.parallel import summing_kernels as kernels

        tiles = tiles or chosen.get(GROUPED, kernels.GROUPED_TILES[0])
        kernels.add_grouped(sum_EOI, holds, left_RO, right_RI, ends_E, tiles)
    elif left_RO.shape[0]:
        _add(sum_EOI, holds, F.grouped_mm(left_RO.t(), right_RI, offs=ends_E))
    elif not holds:
        sum_EOI.zero_()


def add_scaled_product(
    sum_NK: Tensor,
    holds: bool,
    left_NM: Tensor,
    right_KM: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    tiles: Any = None,
) -> None:
    """Add a product of matrices in 8 bits to a sum, or write it there if nothing is there yet.

    Args:
        scales: scale factors of both matrices, 0-d fp32 tensors.
        dtype: format to which a CPU rounds the product first.
        tiles: tiles of a GPU's kernel; the chosen ones when not given.
    """
    if sum_NK.is_cuda:
        from runtime.parallel import summing_kernels as kernels

        tiles = tiles or chosen.get(SCALED, kernels.SCALED_TILES[0])
        kernels.add_scaled(sum_NK, holds, left_NM, right_KM, scales, tiles)
    else:
        product = left_NM.float() @ right_KM.float().t() / (scales[0] * scales[1])
        _add(sum_NK, holds, product.to(dtype))


def _add(total: Tensor, holds: bool, product: Tensor) -> None:
    if holds:
        total.add_(product)
    else:
        total.copy_(product)


def _add_grouped(gradient_RO: Tensor, x_RI: Tensor, ends_E: Tensor, place: Tensor) -> Tensor:
    """Add the gradients of weights [E, O, I] to their sum, and return the gradient of the place."""
    own = place_of(place)
    add_grouped_product(*own.receive(), gradient_RO, x_RI, ends_E)
    return own.gradient


def _add_scaled(
    gradient_NM: Tensor,
    x_KM: Tensor,
    gradient_scale: Tensor,
    x_scale: Tensor,
    dtype: torch.dtype,
    place: Tensor,
) -> Tensor:
    """Add the gradient of a weight [N, K] to its sum, and return the gradient of the place."""
    own = place_of(place)
    add_scaled_product(*own.receive(), gradient_NM, x_KM, (gradient_scale, x_scale), dtype)
    return own.gradient


for _name, _function in ((GROUPED, _add_grouped), (SCALED, _add_scaled)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _library.impl(_name, lambda *given: torch.empty_like(given[-1]), "Meta")
