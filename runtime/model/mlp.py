"""The dense feed-forward network of a layer. Shapes: see `runtime.model`."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of gpt-oss's activation: the factor within the sigmoid, and the largest inputs."""


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(1.702 gate) (up + 1), both clamped at 7; the gate only from above."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * (gate * SWIGLU_ALPHA).sigmoid() * (up + 1.0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


class Activation(nn.Module):
    """The non-linearity between the matrices of an MLP: f(up), or f(gate) x up."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.function = ACTIVATIONS.get(spec.activation)
        """The activation; None for the one that clamps gate and input."""

    def forward(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        if self.function is None:
            assert gate is not None
            return clamped_swiglu(gate, up)
        return self.function(up) if gate is None else self.function(gate) * up


class MLP(nn.Module):
    """Feed-forward network, gated (SwiGLU) or not, of inner width `width`: [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, width, bias=spec.linear_bias)
        self.gate = nn.Linear(spec.hidden, width, bias=spec.linear_bias) if spec.gated else None
        self.activation = Activation(spec)
        self.down = nn.Linear(width, spec.hidden, bias=spec.linear_bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        result_BSD: Tensor = self.down(self.inner(x_BSD))
        return result_BSD

    def inner(self, x_BSD: Tensor) -> Tensor:
        """The input [B, S, F] of the last matrix."""
        gate = () if self.gate is None else (self.gate(x_BSD),)
        result_BSF: Tensor = self.activation(self.up(x_BSD), *gate)
        return result_BSF
