"""The dense feed-forward network of a layer. Shapes: see `runtime.model`."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec

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
        self.function = ACTIVATIONS[spec.activation]

    def forward(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
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
        if self.gate is None:
            inner_BSF = self.activation(self.up(x_BSD))
        else:
            inner_BSF = self.activation(self.up(x_BSD), self.gate(x_BSD))
        result_BSD: Tensor = self.down(inner_BSF)
        return result_BSD
