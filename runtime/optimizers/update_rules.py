"""Which optimizer updates the shards: the one that the layout names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from costmodels import Layout, ModelSpec
from runtime.optimizers.adafactor import Adafactor
from runtime.optimizers.adam8bit import Adam8bit
from runtime.optimizers.muon import Muon, is_orthogonalised
from runtime.optimizers.shards import MOMENTS, ParameterShard, UpdateRule, parameter_groups
from runtime.parallel.local_tensors import like_parameter
from runtime.parallel.mesh import Grid
from runtime.settings.options import TrainingOptions


class ElementWise:
    """An optimizer of PyTorch whose update of an element depends on that element alone.

    So shards need nothing of each other, and every layout computes the same.
    """

    def __init__(
        self, owned: Sequence[ParameterShard], kind: Any, slots: tuple[str, ...], **settings: Any
    ) -> None:
        self.owned = owned
        self.slots = slots
        self.torch: torch.optim.Optimizer | None = None
        if owned:
            self.torch = kind(parameter_groups(owned), lr=0.0, fused=True, **settings)

    def step(self, learning_rate: float, weight_decay: float) -> None:
        if self.torch is None:
            return
        for group in self.torch.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decayed"] else 0.0
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


def update_rule(
    owned: Sequence[ParameterShard], spec: ModelSpec, layout: Layout, options: TrainingOptions, grid: Grid
) -> UpdateRule:
    """The optimizer that `layout` names, with the settings of `options`."""
    adam: dict[str, Any] = {
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_eps,
    }
    if layout.optimizer == "sgd":
        slots = ("momentum_buffer",) if options.sgd_momentum else ()
        return ElementWise(owned, torch.optim.SGD, slots, momentum=options.sgd_momentum)
    if layout.optimizer == "adafactor":
        return Adafactor(owned, spec.vocab, grid.device)
    if layout.optimizer == "adam8bit":
        return Adam8bit(owned, **adam)
    if layout.optimizer == "muon":
        rest = ElementWise([o for o in owned if not is_orthogonalised(o)], torch.optim.AdamW, MOMENTS, **adam)
        # Rounding to bf16 would let layouts of fp32 drift apart.
        dtype = torch.float32 if layout.precision == "fp32" else torch.bfloat16
        return Muon(owned, rest, options, dtype, grid.device)
    kind = torch.optim.Adam if options.no_decoupled_weight_decay else torch.optim.AdamW
    return ElementWise(owned, kind, MOMENTS, **adam)
