"""The shards that an optimizer updates, their gradients, and the gradient norm of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import local_part
from runtime.parallel.mesh import Grid

CLIP_EPSILON = 1e-6
"""Term added to the norm before a division, as in Megatron-LM and PyTorch."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names of Adam's moments."""

FURTHER_EMBEDDING = "further_embedding.tokens.weight"
"""The copy of the embedding for multi-token prediction on a stage other than the first."""

EXPERT_DIMS = frozenset(("e_replicate", "e_shard", "ep", "etp"))
"""Dimensions of a device mesh that only experts use."""


def is_decayed(name: str, parameter: Tensor) -> bool:
    """True for matrices, which have weight decay, unlike biases and norms (Megatron-LM's rule)."""
    return parameter.ndim > 1 and not name.endswith("bias")


@dataclass(frozen=True)
class ParameterShard:
    """One parameter of this rank."""

    name: str
    parameter: nn.Parameter
    shard: nn.Parameter
    """The optimizer's leaf tensor, which shares the memory of the local part."""
    counts: bool
    """True if this rank counts the shard in the norm; exactly one rank does so for every element."""

    @property
    def decayed(self) -> bool:
        """True if weight decay applies."""
        return is_decayed(self.name, self.parameter)


def parameter_groups(owned: Sequence[ParameterShard]) -> list[dict[str, Any]]:
    """Parameter groups for a PyTorch optimizer, with and without weight decay."""
    groups = [
        {"params": [o.shard for o in owned if o.decayed == decayed], "decayed": decayed}
        for decayed in (True, False)
    ]
    return [group for group in groups if group["params"]]


class UpdateRule(Protocol):
    """A rule that updates weights from gradients, shard by shard: Adam, Muon, ..."""

    slots: tuple[str, ...]
    """Names of the rule's state tensors; not every parameter has all."""

    def step(self, learning_rate: float, weight_decay: float) -> None:
        """Update the shards that have gradients; `weight_decay` applies to the decayed ones."""

    def states(self) -> dict[str, Tensor]:
        """State tensors by `name.slot`, split like the parameters; zeros before the first step."""

    def load(self, states: Mapping[str, Tensor], updates: int) -> None:
        """Continue after `updates` steps from `states`, which have the form of `states()`."""


@runtime_checkable
class TakesFactor(Protocol):
    """A rule whose kernel can multiply gradients by a factor where it reads them."""

    takes_factor: bool
    """True if it does so for the shards of this rank."""
    factor: Tensor | None
    """The factor of the next step, a scalar."""


class ShardedOptimizer:
    """An optimizer on plain local tensors, as element-wise work needs no distributed ones. The rule runs
    where FSDP2 keeps the shards: on the device, or on the host if the layout offloads the optimizer.
    """

    def __init__(
        self,
        stages: Sequence[Transformer],
        grid: Grid,
        rule: Callable[[list[ParameterShard]], UpdateRule],
    ) -> None:
        self.grid = grid
        self.owned = [
            ParameterShard(name, p, nn.Parameter(local_part(p.detach())), _counts(name, p, stage, grid))
            for stage in stages
            for name, p in stage.named_parameters()
            if p.requires_grad
        ]
        self.tied = _tied_copies(stages, self.owned)
        self.rule = rule(self.owned)

    def collect_gradients(self) -> None:
        """Give the accumulated gradients, summed over the whole batch, to the shards."""
        for owned in self.owned:
            gradient = owned.parameter.grad
            if isinstance(gradient, DTensor) and isinstance(owned.parameter, DTensor):
                # Under tensor parallelism some gradients arrive as sums still to be made.
                gradient = gradient.redistribute(placements=owned.parameter.placements)
            owned.shard.grad = None if gradient is None else local_part(gradient)
        if len(self.tied) == 2:
            first, second = (owned.shard.grad for owned in self.tied)
            if first is not None and second is not None:
                first += second
                second.copy_(first)
        elif self.tied and self.grid.embedding_group is not None:
            self._sum_over(self.grid.embedding_group, self.tied[0].shard)

    def _sum_over(self, group: dist.ProcessGroup, shard: nn.Parameter) -> None:
        """Sum the gradient of `shard`, which may be in host memory, over the ranks of `group`."""
        if shard.grad is not None:
            gradient = shard.grad.to(self.grid.device)
            dist.all_reduce(gradient, group=group)
            shard.grad.copy_(gradient)

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared L2 norm of the gradient, a fp64 scalar."""
        gradients = [o.shard.grad for o in self.owned if o.counts and o.shard.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.grid.device)
        norms = torch._foreach_norm(gradients)
        return torch.stack(norms).double().square().sum().to(self.grid.device)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor`, a scalar tensor, now or within the step."""
        if isinstance(self.rule, TakesFactor) and self.rule.takes_factor:
            self.rule.factor = factor
        else:
            self._multiply(factor)

    def _multiply(self, factor: Tensor) -> None:
        gradients = [o.shard.grad for o in self.owned if o.shard.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def clip_values(self, limit: float) -> None:
        """Clip every element of the gradient to [-limit, limit]."""
        if isinstance(self.rule, TakesFactor) and self.rule.factor is not None:
            self._multiply(self.rule.factor)
            self.rule.factor = None
        nn.utils.clip_grad_value_([owned.shard for owned in self.owned], limit)

    def step(self, learning_rate: float, weight_decay: float) -> None:
        """Update the weights and drop the gradients."""
        self.rule.step(learning_rate, weight_decay)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for owned in self.owned:
            owned.parameter.grad = owned.shard.grad = None


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor, at most 1, that reduces gradients of `norm` to a norm of at most `limit`."""
    return (limit / (norm + CLIP_EPSILON)).clamp(max=1.0).float()


def _tied_copies(stages: Sequence[Transformer], owned: Sequence[ParameterShard]) -> list[ParameterShard]:
    """This rank's copies of an embedding shared by first and last stage."""
    copies = [stage.token_table for stage in stages if stage.token_table is not None]
    return [o for o in owned if any(o.parameter is copy for copy in copies)]


def _is_expert(parameter: Tensor) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return not EXPERT_DIMS.isdisjoint(names or ())


def _counts(name: str, parameter: Tensor, stage: Transformer, grid: Grid) -> bool:
    if name == FURTHER_EMBEDDING or (name == "head.weight" and stage.tied):
        return False
    # Copies differ in the coordinates of dimensions that do not split the parameter.
    coordinates = {"tp": grid.tp_rank}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dims, own = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        if _is_expert(parameter):
            # The mesh of experts covers the tensor-parallel ranks too.
            coordinates = {}
        for dim, place, index in zip(dims, parameter.placements, own, strict=True):
            coordinates[dim] = index if place.is_replicate() else 0
    return not any(coordinates.values())
