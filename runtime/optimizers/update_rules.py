"""The update rules of all optimizers of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from costmodels import Layout, ModelSpec
from costmodels.spec.layout import Optimizer
from runtime.optimizers.adafactor import Adafactor
from runtime.optimizers.adam8bit import Adam8bit
from runtime.optimizers.came import Came
from runtime.optimizers.muon import Muon, is_orthogonalised
from runtime.optimizers.shards import MOMENTS, ParameterShard, UpdateRule, parameter_groups
from runtime.parallel.local_tensors import like_parameter
from runtime.parallel.mesh import Grid
from runtime.settings.training_options import TrainingOptions


class ElementWise:
    """A PyTorch optimizer whose update of an element depends only on that element.

    So shards are independent, and every layout gives the same result.
    """

    def __init__(
        self, owned: Sequence[ParameterShard], kind: Any, slots: tuple[str, ...], **settings: Any
    ) -> None:
        self.owned = owned
        self.slots = slots
        self.torch: torch.optim.Optimizer | None = None
        # On a CPU gradients are multiplied apart, as before, so that losses stay equal bit for bit.
        self.takes_factor = slots == MOMENTS and all(one.shard.device.type == "cuda" for one in owned)
        self.factor: Tensor | None = None
        if owned:
            self.torch = kind(parameter_groups(owned), lr=0.0, fused=True, **settings)

    def step(self, learning_rate: float, weight_decay: float) -> None:
        factor, self.factor = self.factor, None
        if self.torch is None:
            return
        for group in self.torch.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decayed"] else 0.0
        # PyTorch's fused kernel divides by its scale, and writes the gradients.
        scaled: Any = self.torch
        scaled.grad_scale = None if factor is None else factor.reciprocal()
        self.torch.step()

    def states(self) -> dict[str, Tensor]:
        return {
            f"{owned.name}.{slot}": like_parameter(self._state(owned)[slot], owned.parameter)
            for owned in self.owned
            for slot in self.slots
        }

    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        for owned in self.owned:
            state = self._state(owned)
            if "step" in state:
                state["step"].fill_(updates)

    def _state(self, owned: ParameterShard) -> dict[str, Tensor]:
        assert self.torch is not None
        state: dict[str, Tensor] = self.torch.state[owned.shard]
        if not state:
            if self.slots == MOMENTS:
                state["step"] = torch.zeros((), dtype=torch.float32, device=owned.shard.device)
            for slot in self.slots:
                state[slot] = torch.zeros_like(owned.shard)
        return state


class Setting(NamedTuple):
    """Inputs of a rule besides its shards."""

    spec: ModelSpec
    layout: Layout
    options: TrainingOptions
    device: torch.device
    """The device of the parameters, even if the optimizer works on the host."""

    @property
    def adam(self) -> dict[str, Any]:
        """Arguments of PyTorch's Adam."""
        return {
            "betas": (self.options.adam_beta1, self.options.adam_beta2),
            "eps": self.options.adam_eps,
        }


def _adam(owned: Sequence[ParameterShard], setting: Setting) -> UpdateRule:
    kind = torch.optim.Adam if setting.options.no_decoupled_weight_decay else torch.optim.AdamW
    return ElementWise(owned, kind, MOMENTS, **setting.adam)


def _sgd(owned: Sequence[ParameterShard], setting: Setting) -> UpdateRule:
    momentum = setting.options.sgd_momentum
    return ElementWise(owned, torch.optim.SGD, ("momentum_buffer",) if momentum else (), momentum=momentum)


def _adafactor(owned: Sequence[ParameterShard], setting: Setting) -> UpdateRule:
    return Adafactor(owned, setting.spec.vocab, setting.device)


def _came(owned: Sequence[ParameterShard], setting: Setting) -> UpdateRule:
    return Came(owned, setting.spec.vocab, setting.options, setting.device)


def _muon(owned: Sequence[ParameterShard], setting: Setting) -> UpdateRule:
    others = [o for o in owned if not is_orthogonalised(o)]
    rest = ElementWise(others, torch.optim.AdamW, MOMENTS, **setting.adam)
    # Rounding to bf16 would let layouts of fp32 drift apart.
    dtype = torch.float32 if setting.layout.precision == "fp32" else torch.bfloat16
    return Muon(owned, rest, setting.options, dtype, setting.device)


def _adam8bit(owned: Sequence[ParameterShard], setting: Setting) -> UpdateRule:
    return Adam8bit(owned, **setting.adam)


RULES: dict[Optimizer, Callable[[Sequence[ParameterShard], Setting], UpdateRule]] = {
    "adam": _adam,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "came": _came,
    "muon": _muon,
    "adam8bit": _adam8bit,
}
"""The rule of each optimizer, made for the shards of this rank."""


def update_rule(
    owned: Sequence[ParameterShard], spec: ModelSpec, layout: Layout, options: TrainingOptions, grid: Grid
) -> UpdateRule:
    """The optimizer that `layout` names, with the settings of `options`."""
    return RULES[layout.optimizer](owned, Setting(spec, layout, options, grid.device))
