"""8-bit GEMMs with one scale per matrix, in operations that compilers can fuse.

The largest element of a matrix and its cast are plain operations, so that compiled layers fuse them with what
makes the matrix. Numbers are those of torchao's recipe "tensorwise".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.model.number_formats import FLOAT8_SIDES
from runtime.parallel import summing_products  # noqa: F401, defines an operator

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


class Options(NamedTuple):
    """Properties of a linear layer."""

    by_rows: bool = False
    """The kernel that makes the gradient of the result, such as that of a norm, goes through its rows."""
    slotted: bool = False
    """A slot comes with the result: a zero whose gradient is an upper bound of the magnitudes of the result's
    gradient (`runtime.parallel.float8_bounds`)."""


PLAIN = Options()


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


def narrow(matrix: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Narrow:
    """A matrix in 8 bits, with its own scale.

    Args:
        bound: upper bound of magnitudes, which replaces the largest one.
    """
    scale = scale_for(matrix.abs().amax() if bound is None else bound, dtype)
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


def narrow_weight(weight: Tensor, dtype: torch.dtype) -> Narrow:
    """A weight in 8 bits, which ranks may have gathered so."""
    if isinstance(weight, Float8Weight):
        return Narrow(weight.elements, weight.scale, weight.scale.reciprocal())
    return narrow(weight, dtype)


def multiply_narrow(
    left: Narrow, right: Narrow, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """left [I, K] times the transpose of right [J, K], plus the bias [J]: [I, J].

    Args:
        fast: True if sums over K may be less accurate.
    """
    if left.elements.device.type != "cuda":
        product = left.elements.float() @ right.elements.float().t() / (left.scale * right.scale)
        return (product if bias is None else product + bias).to(dtype)
    result: Tensor = torch._scaled_mm(
        left.elements,
        right.elements.t(),
        scale_a=left.inverse,
        scale_b=right.inverse,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result


def _add_to_sum(left: Narrow, right: Narrow, dtype: torch.dtype, place: Tensor) -> Tensor:
    """Add a weight's gradient, the product of both, to its sum; returns the gradient of the sum's place."""
    result: Tensor = torch.ops.planner.add_weight_gradient_scaled(
        left.elements, right.elements, left.scale, right.scale, dtype, place
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


class Bounded(NamedTuple):
    """The input of a linear layer, and an upper bound of its magnitudes that may be far above them."""

    rows: Tensor
    bound: Tensor


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """The differentiable GEMM: x [M, K], weight [N, K], bias [N] -> [M, N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_NK: Tensor,
        kinds: Formats,
        bias_N: Tensor | None = None,
        bound: Tensor | None = None,
        options: Options = PLAIN,
        place: Tensor | None = None,
        *cast: Tensor,
    ) -> Any:
        # Not in 8 bits: other layers keep the same activations, and compilers choose what is kept.
        ctx.kinds, ctx.options, ctx.place, ctx.given = kinds, options, place, len(cast)
        x = narrow(x_MK, kinds.operand, bound)
        if cast:
            rows_NK, *rest = cast
            ctx.save_for_backward(x_MK, x.scale, *rest)
            weight = Narrow(rows_NK, *rest[1:])
        else:
            ctx.save_for_backward(x_MK, x.scale, weight_NK)
            weight = narrow_weight(weight_NK, kinds.operand)
        ctx.set_materialize_grads(False)
        rows_MN = multiply_narrow(x.shared(), weight, x_MK.dtype, True, bias_N)
        return (rows_MN, x.scale.new_zeros(())) if options.slotted else rows_MN

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_MN: Tensor, bound: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        x_MK, x_scale, *parts = ctx.saved_tensors
        kinds, dtype = ctx.kinds, grad_MN.dtype
        needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        if bound is None and needs_bias:
            # Sums and largest elements of columns share one read.
            bound = grad_MN.abs().amax(0).amax()
        elif bound is None and ctx.options.by_rows:
            bound = grad_MN.abs().amax(-1).amax()
        gradient = narrow(grad_MN, kinds.gradient, bound)
        of_x = of_weight = of_place = None
        if needs_x:
            weight = Narrow(*parts) if ctx.given else narrow_weight(parts[0], kinds.operand).transposed()
            of_x = multiply_narrow(gradient, weight, dtype, fast=False)
        if needs_weight:
            x = Narrow(cast(x_MK, x_scale, kinds.operand), x_scale, x_scale.reciprocal())
            operands = _filled(gradient).transposed(), _filled(x).transposed()
            if ctx.place is None:
                of_weight = multiply_narrow(*operands, dtype, fast=False)
            else:
                of_place = _add_to_sum(*operands, dtype, ctx.place)
        of_bias = grad_MN.sum(0) if needs_bias else None
        return of_x, of_weight, None, of_bias, None, None, of_place, *(None for _ in range(ctx.given))


def tensorwise_linear(
    x: Tensor | Bounded,
    weight: Tensor,
    bias: Tensor | None = None,
    narrow: tuple[Tensor, ...] = (),
    above: Callable[[], Tensor] | None = None,
    options: Options = PLAIN,
    place: Tensor | None = None,
) -> Any:
    """A linear layer in fp8 with one scale per tensor; arguments are those of torch.nn.functional.linear.

    Args:
        weight: gets a gradient; its elements are not read where `narrow` has them.
        narrow: the weight in 8 bits, the same transposed, their scale factor and its reciprocal.
        above: function without arguments that returns an upper bound of the magnitudes of `x`.
        place: place of the sum to which the gradient of the weight is added.
    """
    bound = None if above is None else above()
    if isinstance(x, Bounded):
        # Compilers compute in forward, and keep, what forward's result depends on.
        x, loose = x
        bound = torch.minimum(x.detach().abs().amax(), loose)
    # Views are made outside: compiled code may write over results that are none.
    rows: Any = _Product.apply(x.flatten(0, -2), weight, formats(), bias, bound, options, place, *narrow)
    shape = *x.shape[:-1], -1
    return (rows[0].view(shape), rows[1]) if options.slotted else rows.view(shape)


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
    return is_tensorwise(linear) and linear.__dict__.get("sharers", 1) == 1


def is_tensorwise(linear: nn.Linear) -> bool:
    """Return whether a layer multiplies in 8 bits with one scale per tensor."""
    product = linear.__dict__.get("product")
    return getattr(product, "func", product) is tensorwise_linear
