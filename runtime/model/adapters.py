"""Low-rank adapters on frozen linear layers. Shapes: see `runtime.model`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec
from costmodels.layers.adapters import adapted_layers
from costmodels.spec.model_parts import MlpKind

DOWN, UP = "lora_a", "lora_b"
"""Names of an adapter's matrices, [R, I] and [O, R]."""


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and a low-rank adapter: [.., I] -> [.., O] (arXiv:2106.09685, section 4.1)."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank))
        self.scale = scale
        self.product: Any = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.adapt(self.product(x, self.weight, self.bias), x, self.lora_a, self.lora_b)

    def adapt(self, result: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """The sum of `result`, the frozen layer's output for `x`, and of the adapter's output for `x`."""
        return result + F.linear(F.linear(x, lora_a), lora_b) * self.scale


def add_adapters(block: nn.Module, spec: ModelSpec, mlp: MlpKind) -> None:
    """Put adapters into a block; all other parameters are frozen."""
    block.requires_grad_(False)
    assert spec.lora is not None
    for layer in adapted_layers(spec, mlp):
        place, _, name = layer.module.rpartition(".")
        parent = block.get_submodule(place)
        linear = getattr(parent, name)
        adapted = AdaptedLinear(linear, spec.lora.rank, spec.lora.scale)
        adapted.requires_grad_(False)
        for one in (DOWN, UP):
            getattr(adapted, one).requires_grad_(True)
        setattr(parent, name, adapted)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.endswith((DOWN, UP))
