"""Linear layers whose weight gradients are added to sums in fp32 by the GEMM that makes them.

Otherwise a GEMM writes a 16-bit gradient, and an addition reads it again to add it to the sum. On a GPU, the
GEMM's epilogue adds to the sum itself, without rounding to 16 bits first. On a CPU, the gradient is rounded
and then added, as everywhere else (`runtime.parallel.working_copies`); only tests do so.

Layers of one kind share a compiled graph, and a sum has no memory before its first gradient. So the graph
gets an empty tensor for each sum, its place. The place's own gradient is empty too, and autograd reports with
it that the sum has the weight's gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.logs.console import say
from runtime.model.adapters import AdaptedLinear
from runtime.parallel.recomputation import memory_of

Receive = Callable[[], tuple[Tensor, bool]]
"""A function that returns a sum's memory, and whether there are earlier gradients in it."""

PLACE = "place"
"""The attribute of a layer that is the place of its sum; names of others end so, for layers with several."""


class Place:
    """The place of one sum, which the layer of the weight gets as an attribute."""

    def __init__(self, layer: nn.Module, device: torch.device, receive: Receive, name: str = PLACE) -> None:
        self.receive = receive
        self.tensor = torch.empty(0, device=device, requires_grad=True)
        self.gradient = torch.empty_like(self.tensor, requires_grad=False)
        setattr(layer, name, self.tensor)
        _places[memory_of(self.tensor)] = self


_places: WeakValueDictionary[int, Place] = WeakValueDictionary()
"""Places by the memory of their tensors; autograd may make other tensors of the same memory."""


def places_in(module: nn.Module) -> list[Tensor]:
    """The places of a module's own sums."""
    return [one for name, one in vars(module).items() if name.endswith(PLACE)]


def place_of(tensor: Tensor) -> Place:
    """The place that a tensor stands for."""
    return _places[memory_of(tensor)]


_library: Any = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
# Compilers may lay out the operands as for other GEMMs.
_library.define(
    "add_weight_gradient(Tensor gradient, Tensor x, Tensor place) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


def _add(gradient_NT: Tensor, x_TK: Tensor, place: Tensor) -> Tensor:
    """Add the gradient of a weight [N, K] to its sum, and return the gradient of the place."""
    own = place_of(place)
    add_product(*own.receive(), gradient_NT, x_TK)
    return own.gradient


_library.impl("add_weight_gradient", _add, "CompositeExplicitAutograd")
_library.impl("add_weight_gradient", lambda gradient, x, place: torch.empty_like(place), "Meta")


def add_product(sum_NK: Tensor, holds: bool, left_NT: Tensor, right_TK: Tensor) -> None:
    """Add a product of 16-bit matrices to a sum in fp32, or write it there if nothing is there yet."""
    if sum_NK.is_cuda:
        torch.addmm(sum_NK, left_NT, right_TK, torch.float32, beta=int(holds), out=sum_NK)  # type: ignore[call-overload]
    elif holds:
        sum_NK.add_(torch.mm(left_NT, right_TK))
    else:
        sum_NK.copy_(torch.mm(left_NT, right_TK))


class _Product(torch.autograd.Function):
    """torch.nn.functional.linear, whose backward pass adds the weight's gradient to a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place, ctx.has_bias = place, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_TN, x_TK = grad.flatten(0, -2), x.flatten(0, -2)
        of_place = torch.ops.planner.add_weight_gradient(grad_TN.t(), x_TK, ctx.place)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        return of_x, None, grad_TN.sum(0) if ctx.has_bias else None, of_place


@cache
def keep_in_graphs() -> None:
    """Let compilers take the product as one operation; loads the compiler, which eager layers do without."""
    torch.compiler.allow_in_graph(_Product)  # type: ignore[no-untyped-call]


def summing_linear(x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor) -> Tensor:
    """A linear layer, as torch.nn.functional.linear; the sum at `place` gets the weight's gradient."""
    result: Tensor = _Product.apply(x, weight, bias, place)  # type: ignore[no-untyped-call]
    return result


def can_sum(linear: nn.Linear) -> bool:
    """Return whether a layer multiplies in 16 bits by the weight that it holds, and nothing else does."""
    own = linear.__dict__
    is_plain = own.get("product", F.linear) is F.linear and own.get("sharers", 1) == 1
    return is_plain and not isinstance(linear, AdaptedLinear)


@cache
def sums_in_gemms(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device's GEMMs add products of a 16-bit format to fp32 sums, and add them right.

    A GPU is tried once, with one log line if it does not. A CPU has no such GEMM, and the operation would
    take more of the host's time than separate additions.
    """
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        return True  # Fake tensors stand for a GPU of today.
    try:
        fault = "" if _adds_right(device, dtype) else "other values"
    except (RuntimeError, NotImplementedError) as error:
        fault = str(error).partition("\n")[0]
    if fault and not (dist.is_initialized() and dist.get_rank()):
        say(f"note: GEMMs do not add weight gradients to their sums here ({fault}); kernels do", sys.stderr)
    return not fault


def _adds_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether two products of small whole numbers, which are exact, become the right sum."""
    draw = torch.Generator().manual_seed(1)
    left_NT, right_TK = (torch.randint(-4, 5, size, generator=draw).float() for size in ((48, 64), (64, 32)))
    sum_NK = torch.full((48, 32), torch.nan, device=device)
    # Gradients come as transposed rows.
    operands = left_NT.t().to(device, dtype).t(), right_TK.to(device, dtype)
    for holds in (False, True):
        add_product(sum_NK, holds, *operands)
    return torch.equal(sum_NK.cpu(), 2 * left_NT @ right_TK)
