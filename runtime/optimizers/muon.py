"""Muon: orthogonalised momentum (kellerjordan.github.io/posts/muon), as in torch.optim.Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from costmodels.layers.optimizer import has_matrices
from runtime.optimizers.sharding import local_matrices, whole_matrices
from runtime.optimizers.shards import ParameterShard, UpdateRule
from runtime.parallel.local_tensors import like_parameter
from runtime.settings.training_options import TrainingOptions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients of the quintic Newton-Schulz iteration, also used in PyTorch."""

EPSILON = 1e-7
"""Least norm by which the iteration divides."""

SLOT = "momentum_buffer"
"""PyTorch's name of the momentum."""


def is_orthogonalised(owned: ParameterShard) -> bool:
    """Return whether Muon updates a parameter: a matrix of the layers, or of an expert; Adam updates the
    rest."""
    is_layer = owned.name.startswith(("layers.", "mtp."))
    return is_layer and has_matrices(owned.name, owned.parameter.shape)


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalise matrices [.., R, C] in their number format, so that singular values are close to one.

    Args:
        steps: Newton-Schulz iterations.
    """
    a, b, c = COEFFICIENTS
    multiply_add = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def update_scale(mode: str, rows: int, columns: int) -> float:
    """Factor of the update of a matrix; `mode` is one of `training_options.MUON_SCALE_MODES`."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(max(1.0, ratio) if mode == "shape_scaling" else ratio)


class Muon:
    """Muon for the matrices of the layers, `rest` for all other parameters.

    Momentum is element-wise and stays on the shards. For the orthogonalisation, the ranks that share a matrix
    gather its update in `dtype`, one matrix after the other. Each rank computes the whole matrix and keeps
    its part. PyTorch's Muon does this in bf16.
    """

    def __init__(
        self,
        owned: Sequence[ParameterShard],
        rest: UpdateRule,
        options: TrainingOptions,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.matrices = [o for o in owned if is_orthogonalised(o)]
        self.momenta = [torch.zeros_like(o.shard, requires_grad=False) for o in self.matrices]
        self.rest = rest
        self.slots = (*rest.slots, SLOT)
        self.options = options
        self.dtype = dtype
        self.device = device

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        self.rest.step(learning_rate, weight_decay)
        for owned, momentum in zip(self.matrices, self.momenta, strict=True):
            if owned.shard.grad is not None:
                self._update(owned, owned.shard.grad, momentum, learning_rate, weight_decay)

    def _update(
        self,
        owned: ParameterShard,
        gradient: Tensor,
        momentum: Tensor,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        options, parameter = self.options, owned.parameter
        momentum.lerp_(gradient, 1.0 - options.muon_momentum)
        update = momentum if options.no_muon_nesterov else gradient.lerp(momentum, options.muon_momentum)
        whole = whole_matrices(update.to(self.device, self.dtype), parameter)
        part = local_matrices(orthogonalise(whole, options.muon_num_ns_steps), parameter)
        scale = options.muon_extra_scale_factor * update_scale(options.muon_scale_mode, *parameter.shape[-2:])
        owned.shard.mul_(1.0 - learning_rate * weight_decay)
        owned.shard.add_(part.to(owned.shard.device), alpha=-learning_rate * scale)

    def states(self) -> dict[str, Tensor]:
        own = {
            f"{owned.name}.{SLOT}": like_parameter(momentum, owned.parameter)
            for owned, momentum in zip(self.matrices, self.momenta, strict=True)
        }
        return own | self.rest.states()

    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        self.rest.load(states, updates)
