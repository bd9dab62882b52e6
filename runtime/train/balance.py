"""Balanced experts: balancing losses, expert biases, and the logged load.

With E experts, k of a token, p the scores of a token (over their sum if they are sigmoids), and a unit of T
tokens (a microbatch or a sequence) of which expert i was chosen for n_i:

    aux = E / (k T^2) sum_i n_i sum_t p_ti     Switch Transformers (arXiv:2101.03961, equation 4), 1 if even
    z   = mean_t logsumexp(logits_t)^2         ST-MoE (arXiv:2202.08906, equation 5)

The objective is the mean token loss, plus for every layer the coefficients times the means of aux over the
units and of z over the tokens of the global batch. What is reported as loss leaves both out.

A microbatch is the same set of sequences for every layout with the same micro_batch_size. The aux loss of
sequences (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20) does not depend on the layout at all. If experts
have biases, n_i counts the choices by scores without biases, as in that paper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels import ModelSpec
from runtime.model.experts import SMALLEST_SUM, Router
from runtime.parallel.mesh import Grid
from runtime.parallel.recomputation import is_recomputing
from runtime.settings.training_options import TrainingOptions
from runtime.train.executor import Executor


class Load(NamedTuple):
    """The rows of the experts of all layers since the last report."""

    shares: dict[int, list[float]]
    """The share, by layer, of the tokens that chose each expert, times E / k: 1 where all are even."""
    balancing_loss: float | None
    """Mean of aux over layers and units; None where its coefficient is zero."""
    z_loss: float | None
    dropped: float | None
    """Share of dropped pairs of tokens and experts; None for dropless models."""


def _routed_layers(spec: ModelSpec) -> list[int]:
    """Numbers of the layers with experts, those of MTP modules last."""
    last = spec.layer_kind(spec.layers - 1)
    kinds = [*map(spec.layer_kind, range(spec.layers)), *[last] * spec.mtp_depths]
    return [layer for layer, kind in enumerate(kinds) if kind.mlp == "experts"]


class _AddToObjective(torch.autograd.Function):
    """`weights`; backward adds a gradient of `scale` for `objective`, independent of the incoming
    gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, objective: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return grad, scale, None


class Balance:
    """The balance of the routers in this rank's stages."""

    def __init__(self, executor: Executor, spec: ModelSpec, grid: Grid, options: TrainingOptions) -> None:
        self.routers: dict[int, Router] = {}
        for stage in executor.stages:
            self.routers |= stage.routers
        self.spec, self.grid = spec, grid
        # Losses of routers have the divisor and the scale of the losses of tokens in a step.
        self.loss = executor.loss
        by_unit = options.moe_router_load_balancing_type
        self.aux = 0.0 if by_unit == "none" else options.moe_aux_loss_coeff
        self.by_sequence = by_unit == "seq_aux_loss"
        self.z = options.moe_z_loss_coeff
        self.bias_rate = options.moe_router_bias_update_rate
        self.moves_biases = spec.router.expert_bias and self.bias_rate > 0 and spec.lora is None
        device = grid.device
        for router in self.routers.values():
            router.load.zero_()
            router.observe = self.observe
        self.counts_before_step = self.counts()
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        """Sums over layers of the means of aux and of z since the last report, and the pairs dropped."""
        # Tensors, so that layers need not be compiled again when they change.
        self.scale, self.token_share = (torch.zeros((), device=device) for _ in range(2))
        """The factor of the running step, and the inverse of its tokens."""
        self.of_step: tuple[float, float] | None = None
        """The two values that the step's loss was made of."""
        self.steps = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Copy the next step's values from the loss."""
        of_step = self.loss.scale, self.loss.tokens
        if of_step != self.of_step:
            self.of_step = of_step
            self.scale.fill_(of_step[0])
            self.token_share.fill_(1.0 / of_step[1])

    def counts(self) -> Tensor:
        """Number of choices of each expert on this rank since the last report, [layers, E]."""
        layers = self.spec.layers + self.spec.mtp_depths
        none = torch.zeros(self.spec.experts, dtype=torch.int64, device=self.grid.device)
        loads = {layer: router.load for layer, router in self.routers.items()}
        return torch.stack([loads.get(layer, none) for layer in range(layers)])

    def observe(
        self,
        load: Tensor,
        logits: Tensor,
        scores: Tensor,
        chosen: Tensor,
        weights: Tensor,
        kept: Tensor | None,
    ) -> Tensor:
        """Count the choices of a microbatch, and attach its balancing losses to `weights`."""
        if not torch.is_grad_enabled():
            return weights
        counts = self._count(chosen)
        # No compiled layer that counts runs again; what backward computes again of it counts nothing.
        first = torch.compiler.is_compiling() or not is_recomputing()
        if first:
            load += counts.sum(0)
            if kept is not None:
                self.totals[2] += (~kept).sum()
        if not (self.aux or self.z):
            return weights
        if self.spec.router.expert_bias:
            counts = self._count(scores.topk(self.spec.top_k, -1).indices)
        aux, z = self._aux(scores, counts), self._z(logits)
        if first:
            self.totals[:2] += torch.stack((aux.detach(), z.detach())).double()
        objective = self.aux * aux + self.z * z
        result: Tensor = _AddToObjective.apply(weights, objective, self.scale)  # type: ignore[no-untyped-call]
        return result

    def end_step(self, updated: bool) -> None:
        """Move the biases towards an even load, if the step has updated the weights.

        Every expert's bias rises (or falls) by the rate if its load in the global batch is below (or above)
        the mean (Wang et al., arXiv:2408.15664, algorithm 1).
        """
        self.steps += 1
        if not self.moves_biases:
            return
        if updated:
            load = self._sum(self.counts() - self.counts_before_step).double()
            direction = (load.mean(dim=1, keepdim=True) - load).sign().float()
            for layer, router in self.routers.items():
                assert router.expert_bias is not None
                router.expert_bias += self.bias_rate * direction[layer]
        self.counts_before_step = self.counts()

    def report(self) -> Load:
        """The load since the last report; every rank calls it."""
        counts, totals = self._sum(self.counts()), self._sum(self.totals)
        layers = _routed_layers(self.spec)
        routed = counts[layers].double()
        pairs = routed.sum(dim=1, keepdim=True).clamp(min=1)
        shares = (routed / pairs * self.spec.experts).tolist()
        aux, z, dropped = totals.tolist()
        mean = 1.0 / (max(self.steps, 1) * len(layers))
        for router in self.routers.values():
            router.load.zero_()
        self.counts_before_step.zero_()
        self.totals.zero_()
        self.steps = 0
        return Load(
            dict(zip(layers, shares, strict=True)),
            aux * mean if self.aux else None,
            z * mean if self.z else None,
            dropped / float(pairs.sum()) if self.spec.router.capacity_factor else None,
        )

    def biases(self) -> dict[str, Tensor]:
        """The expert biases of this rank's layers by the names that checkpoints store."""
        places = {layer: f"layers.{layer}" for layer in range(self.spec.layers)}
        places |= {self.spec.layers + depth: f"mtp.{depth}.block" for depth in range(self.spec.mtp_depths)}
        return {
            f"{places[layer]}.mlp.router.expert_bias": router.expert_bias
            for layer, router in self.routers.items()
            if router.expert_bias is not None
        }

    def _count(self, chosen: Tensor) -> Tensor:
        """Number of choices of each expert in each sequence: [B, S, k] -> [B, E]."""
        flat = chosen.flatten(1)
        counts = torch.zeros(len(flat), self.spec.experts, dtype=torch.int64, device=flat.device)
        return counts.scatter_add_(1, flat, torch.ones_like(flat))

    def _aux(self, scores: Tensor, counts: Tensor) -> Tensor:
        """This rank's part of the mean of aux over the units of the global batch."""
        if self.grid.sequence_group is not None:
            dist.all_reduce(counts, group=self.grid.sequence_group)
        if self.spec.router.score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + SMALLEST_SUM)
        sums = scores.sum(1)
        tokens = self.spec.seq
        if not self.by_sequence:
            tokens *= counts.shape[0]
            counts, sums = counts.sum(0), sums.sum(0)
        factor = self.spec.experts / (self.spec.top_k * tokens)
        return factor * self.token_share * (counts * sums).sum()

    def _z(self, logits: Tensor) -> Tensor:
        """This rank's part of the mean of z over the tokens of the global batch."""
        return logits.logsumexp(-1).square().sum() * self.token_share

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks; each rank has different tokens or layers."""
        values = values.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        return values
