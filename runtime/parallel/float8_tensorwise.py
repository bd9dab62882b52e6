"""8-bit GEMMs with one scale per matrix, in operations that compilers can fuse.

The largest element of a matrix and its cast are plain operations, so that compiled layers fuse them with what
makes the matrix. Numbers are those of torchao's recipe "tensorwise".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.model.number_formats import FLOAT8_SIDES

SMALLEST = 1e-12
"""Lower bound of a matrix's largest element in the computation of its scale."""


FUSED_OPERATIONS = 60
"""Operations on an element that Inductor computes again where they are read: those of gelu's backward."""


class Formats(NamedTuple):
    """The formats of a device."""

    operand: torch.dtype
    """The number format of weights and activations, with more mantissa bits than that of gradients."""
    gradient: torch.dtype
    """The number format of activation gradients, with a wider range."""


def formats() -> Formats:
    """The fp8 formats of this PyTorch build's kernels; AMD's MI300 has special ones."""
    from torchao.float8.config import e4m3_dtype, e5m2_dtype

    return Formats(e4m3_dtype, e5m2_dtype)


class Narrow(NamedTuple):
    """A matrix in 8 bits."""

    elements: Tensor
    scale: Tensor
    """The scale factor of the elements: a 0-d fp32 tensor."""
    inverse: Tensor
    """The reciprocal of the scale factor."""

    def transposed(self) -> Narrow:
        """The transposed matrix with contiguous rows."""
        return self._replace(elements=self.elements.t().contiguous()).shared()

    def shared(self) -> Narrow:
        """The matrix for several GEMMs.

        Inductor makes one anew for each GEMM in 8 bits that reads it, unless it is viewed by its strides.
        """
        return self._replace(elements=self.elements.as_strided(self.elements.shape, self.elements.stride()))


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale factors of matrices whose largest elements are `largest`, in fp32."""
    # Compiled and eager quotients of fp32 differ in their last bit.
    return (torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)).float()


def cast(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of a matrix in 8 bits; with the matrix's own scale none is out of range."""
    # Not by `float`: compilers would keep what makes the matrix in fp32 for the cast, besides it in 16 bits.
    return (matrix * scale.view(1)).to(dtype)


def narrow(matrix: Tensor, dtype: torch.dtype) -> Narrow:
    """A matrix in 8 bits, with its own scale."""
    scale = scale_for(matrix.abs().amax(), dtype)
    return Narrow(cast(matrix, scale, dtype), scale, scale.reciprocal())


class Float8Weight(torch.Tensor):
    """A weight that FSDP2 has gathered in 8 bits: to autograd a matrix in the format that computes."""

    elements: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Weight:
        made: Float8Weight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elements.size(),
            strides=elements.stride(),
            storage_offset=elements.storage_offset(),
            dtype=dtype,
            device=elements.device,
        )
        made.elements, made.scale = elements, scale
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        # A tensor's own reads elements one by one. Compilers of PyTorch 2.11 ask for it.
        return f"Float8Weight({list(self.shape)}, {self.elements.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["elements", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> Float8Weight:
        return Float8Weight(parts["elements"], parts["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation not in _VIEWS:
            raise NotImplementedError(f"{operation} of a weight in 8 bits")
        weight, *rest = args
        return Float8Weight(operation(weight.elements, *rest, **(kwargs or {})), weight.scale, weight.dtype)


_VIEWS = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.view.default,
)
"""Operators that FSDP2, distributed tensors and autograd apply to a weight."""


def _narrow_weight(weight: Tensor, dtype: torch.dtype) -> Narrow:
    if isinstance(weight, Float8Weight):
        return Narrow(weight.elements, weight.scale, weight.scale.reciprocal())
    return narrow(weight, dtype)


def _multiply(left: Narrow, right: Narrow, dtype: torch.dtype, fast: bool) -> Tensor:
    """left [I, K] times the transpose of right [J, K]: [I, J].

    Args:
        fast: True if sums over K may be less accurate.
    """
    if left.elements.device.type != "cuda":
        product = left.elements.float() @ right.elements.float().t()
        return (product / (left.scale * right.scale)).to(dtype)
    result: Tensor = torch._scaled_mm(
        left.elements,
        right.elements.t(),
        scale_a=left.inverse,
        scale_b=right.inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result


def _filled(matrix: Narrow) -> Narrow:
    """A matrix padded with zero rows to a number over which GEMMs can sum."""
    missing = -matrix.elements.shape[0] % FLOAT8_SIDES
    if not missing:
        return matrix
    # Padding does not know formats in 8 bits.
    bits = F.pad(matrix.elements.view(torch.uint8), (0, 0, 0, missing))
    return matrix._replace(elements=bits.view(matrix.elements.dtype))


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """The differentiable GEMM: x [M, K], weight [N, K] -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, kinds: Formats, *cast: Tensor) -> Tensor:
        # Not in 8 bits: other layers keep the same activations, and compilers choose what is kept.
        ctx.kinds, ctx.given = kinds, len(cast)
        if cast:
            rows_NK, *rest = cast
            ctx.save_for_backward(x_MK, *rest)
            weight = Narrow(rows_NK, *rest[1:])
        else:
            ctx.save_for_backward(x_MK, weight_NK)
            weight = _narrow_weight(weight_NK, kinds.operand)
        return _multiply(narrow(x_MK, kinds.operand).shared(), weight, x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_MK, *parts = ctx.saved_tensors
        kinds, dtype = ctx.kinds, grad_MN.dtype
        gradient, of_x, of_weight = narrow(grad_MN, kinds.gradient), None, None
        if ctx.needs_input_grad[0]:
            weight = Narrow(*parts) if ctx.given else _narrow_weight(parts[0], kinds.operand).transposed()
            of_x = _multiply(gradient, weight, dtype, fast=False)
        if ctx.needs_input_grad[1]:
            x = _filled(narrow(x_MK, kinds.operand)).transposed()
            of_weight = _multiply(_filled(gradient).transposed(), x, dtype, fast=False)
        return of_x, of_weight, None, *(None for _ in range(ctx.given))


def tensorwise_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    narrow: tuple[Tensor, ...] = (),
) -> Tensor:
    """A linear layer in fp8 with one scale per tensor; arguments are those of torch.nn.functional.linear.

    Args:
        weight: gets a gradient; its elements are not read where `narrow` has them.
        narrow: the weight in 8 bits, the same transposed, their scale factor and its reciprocal.
    """
    # Views are made outside: compiled code may write over results that are none.
    rows = _Product.apply(x.flatten(0, -2), weight, formats(), *narrow)
    result: Tensor = rows.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias


def fuse_long_chains() -> None:
    """Let Inductor compute a gradient, its largest magnitude and its cast in one kernel.

    By default Inductor writes results of many operations to memory. In gelu's backward these are the
    magnitudes, which the cast does not need.
    """
    from torch._inductor import config

    config.realize_opcount_threshold = FUSED_OPERATIONS


def multiplies_narrow(linear: nn.Linear) -> bool:
    """Return whether a layer multiplies tensor-wise in 8 bits by the weight that it holds.

    Weights whose rows tensor-parallel ranks join first are joined in 16 bits.
    """
    own = linear.__dict__
    return own.get("product") is tensorwise_linear and own.get("sharers", 1) == 1
