"""AdamW on this rank's shards, and the gradient norm of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.grid import Grid
from runtime.model import Transformer

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as Megatron-LM and PyTorch do."""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """`local` as a distributed tensor that is split the way `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    # Not from_local, which would move what is offloaded to the host to the device of the mesh.
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Weight decay applies to matrices, not to biases and norms (Megatron-LM's rule)."""
    return parameter.ndim > 1 and not name.endswith("bias")


@dataclass(frozen=True)
class Owned:
    """One parameter of this rank."""

    name: str
    parameter: nn.Parameter
    shard: nn.Parameter
    """A leaf that shares the memory of the local part: what the optimizer sees."""
    counts: bool
    """This rank counts the shard in the norm: exactly one rank does for every element."""


class ShardedAdamW:
    """AdamW whose every tensor is a plain local one: element-wise work needs no distributed tensors.

    It runs where FSDP2 keeps the shards: on the device or, when the layout offloads the optimizer, on the
    host.
    """

    def __init__(
        self,
        stages: Sequence[Transformer],
        grid: Grid,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.grid = grid
        self.owned = [
            Owned(name, p, nn.Parameter(local_part(p.detach())), _counts(name, p, stage, grid))
            for stage in stages
            for name, p in stage.named_parameters()
        ]
        self.tied = _tied_copies(stages, self.owned)
        groups = [
            {
                "params": [o.shard for o in self.owned if is_decayed(o.name, o.parameter) == decayed],
                "weight_decay": weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True
        )

    def collect_gradients(self) -> None:
        """Hand the accumulated gradients to the shards, whole sums of every part of the batch."""
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
        """Sum the gradient of `shard`, which may lie in host memory, over the ranks of `group`."""
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
        """Multiply all gradients by `factor`, a scalar tensor."""
        gradients = [o.shard.grad for o in self.owned if o.shard.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def step(self, learning_rate: float) -> None:
        """Update the weights and drop the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for owned in self.owned:
            owned.parameter.grad = owned.shard.grad = None

    def moments(self, updates: int | None = None) -> dict[str, Tensor]:
        """Moments of Adam as `name.moment`, split as the parameters are; zeros before the first step.

        `updates` sets the number of steps that the moments have seen.
        """
        moments = {}
        for owned in self.owned:
            slots = self.adam.state[owned.shard]
            if not slots:
                slots["step"] = torch.zeros((), dtype=torch.float32, device=owned.shard.device)
                slots["exp_avg"] = torch.zeros_like(owned.shard)
                slots["exp_avg_sq"] = torch.zeros_like(owned.shard)
            if updates is not None:
                slots["step"].fill_(updates)
            for slot in ("exp_avg", "exp_avg_sq"):
                moments[f"{owned.name}.{slot}"] = like_parameter(slots[slot], owned.parameter)
        return moments


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What to multiply gradients of `norm` by so that their norm is at most `limit`."""
    return (limit / (norm + CLIP_EPSILON)).clamp(max=1.0).float()


def _tied_copies(stages: Sequence[Transformer], owned: Sequence[Owned]) -> list[Owned]:
    """This rank's copies of the tied weight: the embedding of the first stage, the head of the last."""
    copies = []
    for stage in stages:
        if stage.tied and stage.embedding is not None:
            copies.append(stage.embedding.tokens.weight)
        elif stage.tied and stage.head is not None:
            copies.append(stage.head.weight)
    return [o for o in owned if any(o.parameter is copy for copy in copies)]


def _counts(name: str, parameter: Tensor, stage: Transformer, grid: Grid) -> bool:
    if name == "head.weight" and stage.tied:
        return False
    coordinates = {"tp": grid.tp_rank}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dims, own = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        for dim, place, index in zip(dims, parameter.placements, own, strict=True):
            coordinates[dim] = index if place.is_replicate() else 0
    return not any(coordinates.values())
