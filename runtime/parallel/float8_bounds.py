"""Upper bounds of the operands of tensor-wise GEMMs, for scales without a read of all elements.

A scale needs the largest magnitude of its operand, or a bound that is little above it: a float keeps its
relative precision over many powers of two. A norm's weights bound its output. The rows of a linear layer
after the norm bound that layer's output, and so averages of its rows (attention) and activations without a
gate. The factors of a gated MLP's activation bound the gradients that it returns.
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
from runtime.parallel.float8_tensorwise import (
    Bounded,
    Narrow,
    Options,
    formats,
    is_tensorwise,
    multiplies_narrow,
    narrow_weight,
)
from runtime.parallel.local_tensors import local_part

ROUNDED = 1.01
"""Products in 16 bits exceed those of the largest factors by less."""

ROUNDED_INPUTS = 1.1
"""GEMMs of rounded inputs exceed those of the inputs by less: E4M3 rounds an element by at most 1/16."""

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
    for reader, linear in _averaged(block):
        if linear in norms and multiplies_narrow(linear) and is_tensorwise(reader):
            _set(reader, above=partial(output_bound, norms[linear], linear))
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


def _averaged(block: Block) -> list[tuple[nn.Linear, nn.Linear]]:
    """The linear layers whose inputs are within the magnitudes of another one's output, each with that one.

    Attention averages values. An activation without a gate returns no more than its input.
    """
    attention, network, found = block.attention, _network(block), []
    if isinstance(attention, Attention):
        found.append((attention.output, attention.value))
    elif isinstance(attention, LatentAttention):
        found.append((attention.output, attention.key_value))
    if network is not None and network.gate is None:
        function = network.activation.function
        if any(function is ACTIVATIONS[name] for name in SLOPES):
            found.append((network.down, network.up))
    return found


def norm_bound(norm: nn.Module) -> Tensor:
    """An upper bound of the magnitudes of a norm's output, without a read of it.

    The mean square of D elements is at most 1 before weights multiply them, so that none exceeds the square
    root of D.
    """
    weight_D, bias_D, longest = _factors(norm)
    bound = weight_D.abs().amax() * longest
    return bound if bias_D is None else bound + bias_D.abs().amax()


def _factors(norm: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    """Weight and bias of a norm, and the largest length of a normalised row: the square root of D."""
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    weight_D, bias_D = local_part(norm.weight).detach().float(), getattr(norm, "bias", None)
    if isinstance(norm, NormFromOne):
        weight_D = 1.0 + weight_D
    bias_D = None if bias_D is None else local_part(bias_D).detach().float()
    return weight_D, bias_D, math.sqrt(math.prod(norm.normalized_shape))


def output_bound(norm: nn.Module, linear: nn.Linear) -> Tensor:
    """An upper bound of the magnitudes of a linear layer's output after a norm, without a read of it.

    No product of two vectors exceeds the product of their lengths (Cauchy and Schwarz).
    """
    weight_D, bias_D, longest = _factors(norm)
    cast = _cast(linear)
    rows_ND = cast.elements.float()
    bound_N = (rows_ND * weight_D).square().sum(1).sqrt() * longest
    if bias_D is not None:
        bound_N = bound_N + (rows_ND * bias_D).abs().sum(1)
    bound_N = bound_N * (ROUNDED_INPUTS * cast.inverse)
    if linear.bias is not None:
        bound_N = bound_N + local_part(linear.bias).detach().float().abs()
    return ROUNDED * bound_N.amax()


def _cast(linear: nn.Linear) -> Narrow:
    """The weight in 8 bits by which a layer multiplies."""
    place = getattr(linear, "narrow", None)
    if place is not None:
        return Narrow(place.rows, place.scale, place.inverse)
    return narrow_weight(local_part(linear.weight).detach(), formats().operand)


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
