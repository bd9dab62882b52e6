"""Upper bounds of the operands of tensor-wise GEMMs, for scales without a read of all elements.

A scale needs the largest magnitude of its operand, or a bound that is little above it: a float keeps its
relative precision over many powers of two. A norm's weights bound its output. The factors of a gated MLP's
activation bound the gradients that it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.model.attention import Attention, LatentAttention
from runtime.model.experts import MixtureOfExperts
from runtime.model.gated_delta import GatedDelta
from runtime.model.mlp import ACTIVATIONS, MLP
from runtime.model.norms import NormFromOne
from runtime.model.transformer import Block
from runtime.parallel.float8_tensorwise import Bounded, Options, is_tensorwise
from runtime.parallel.local_tensors import local_part

ROUNDED = 1.01
"""Products in 16 bits exceed those of the largest factors by less."""

STEEPEST = 1.13
"""The largest slope of gelu; that of silu is 1.1."""

SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward.default,
    "gelu": torch.ops.aten.gelu_backward.default,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward.default, approximate="tanh"),
}
"""Gradients of activations, as functions of the gradient of the result and of the input."""


def bound_operands(block: Block) -> None:
    """Give the tensor-wise linear layers of a block bounds of their inputs and gradients."""
    norms = _norms_before(block)
    for linear in [one for one in block.modules() if isinstance(one, nn.Linear) and is_tensorwise(one)]:
        if linear in norms:
            _set(linear, above=partial(norm_bound, norms[linear]))
        else:
            # Results are added to the residual, whose gradients the backward pass of a norm makes.
            _set(linear, options=Options(by_rows=True))
    network = _network(block)
    if network is not None:
        bound_gradients(network)


def _set(linear: nn.Linear, **options: Any) -> None:
    product: Any = linear.product
    linear.product = partial(product, **options)  # type: ignore[assignment]


def _network(block: Block) -> MLP | None:
    """The MLP of a layer, or its shared experts."""
    return block.mlp.shared if isinstance(block.mlp, MixtureOfExperts) else block.mlp


def _norms_before(block: Block) -> dict[nn.Module | None, nn.Module]:
    """The norm whose output a linear layer multiplies, by that layer."""
    attention, network = block.attention, _network(block)
    found: dict[nn.Module | None, nn.Module] = {}
    if block.attention_norm is not None:
        found |= dict.fromkeys(_readers(attention), block.attention_norm)
    if isinstance(attention, LatentAttention):
        compress = attention.compress
        found[attention.key_value] = compress.latent_norm
        if compress.query_norm is not None:
            found[attention.query] = compress.query_norm
    if block.mlp_norm is not None and network is not None:
        found |= dict.fromkeys((network.up, network.gate), block.mlp_norm)
    return found


def _readers(attention: nn.Module) -> tuple[nn.Module | None, ...]:
    """The linear layers that read attention's input."""
    if isinstance(attention, LatentAttention):
        return attention.compress.query or attention.query, attention.compress.latent
    if isinstance(attention, GatedDelta):
        return *attention.inputs.children(), attention.gate
    assert isinstance(attention, Attention)
    return attention.query, attention.key, attention.value, attention.gate


def norm_bound(norm: nn.Module) -> Tensor:
    """An upper bound of the magnitudes of a norm's output, without a read of it.

    The mean square of D elements is at most 1 before weights multiply them, so that none exceeds the square
    root of D.
    """
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    weight = local_part(norm.weight).detach().float()
    bound = (1.0 + weight if isinstance(norm, NormFromOne) else weight).abs().amax()
    bound = bound * math.sqrt(math.prod(norm.normalized_shape))
    bias = getattr(norm, "bias", None)
    return bound if bias is None else bound + local_part(bias).detach().float().abs().amax()


@torch._dynamo.allow_in_graph
class _Gated(torch.autograd.Function):
    """The activation of a gated MLP between its GEMMs: f(gate) x up, with the slots of both.

    The gradients of up and gate are products. The largest elements of the factors bound them, so that the
    incoming gradient alone is read before the casts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        up: Tensor,
        up_slot: Tensor,
        gate: Tensor,
        gate_slot: Tensor,
        largest_up: Tensor,
        largest_active: Tensor,
    ) -> Tensor:
        active = ACTIVATIONS[name](gate)
        ctx.name = name
        ctx.save_for_backward(up, gate, active, largest_up, largest_active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        up, gate, active, largest_up, largest_active = ctx.saved_tensors
        largest = grad.abs().amax()
        of_gate = SLOPES[ctx.name](grad * up, gate)
        bounds = largest * largest_active, STEEPEST * largest * largest_up
        return None, grad * active, bounds[0], of_gate, bounds[1], None, None


def bound_gradients(mlp: MLP) -> None:
    """Let the activation of a gated MLP bound the gradients of the GEMMs before it.

    The bound may be some powers of two above the largest element. E5M2, the format of gradients, has 30 for
    numbers of full precision.
    """
    activation, function = mlp.activation, mlp.activation.function
    names = [name for name in SLOPES if ACTIVATIONS[name] is function]
    up, gate, down = mlp.up, mlp.gate, mlp.down
    if not names or gate is None or not all(map(is_tensorwise, (up, gate, down))):
        return
    [name] = names
    for linear in (up, gate):
        _set(linear, options=Options(slotted=True))
    activation.forward = lambda *inputs: _Gated.apply(name, *inputs)  # type: ignore[method-assign]

    def inner(x_BSD: Tensor) -> Bounded:
        up_BSF, up_slot = up(x_BSD)
        gate_BSF, gate_slot = gate(x_BSD)
        largest_up = up_BSF.detach().abs().amax().float()
        largest_active = ACTIVATIONS[name](gate_BSF.detach()).abs().amax().float()
        inner_BSF = activation(up_BSF, up_slot, gate_BSF, gate_slot, largest_up, largest_active)
        return Bounded(inner_BSF, ROUNDED * largest_up * largest_active)

    mlp.inner = inner  # type: ignore[assignment,method-assign]
