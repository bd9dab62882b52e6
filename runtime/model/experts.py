"""The mixture of experts of a layer: router, experts, shared experts.

Shapes: see `runtime.model.transformer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.model.mlp import MLP, Activation
from runtime.model.routing import (
    Dispatch,
    LocalDispatch,
    capacity,
    grouped_linear,
    rows_of_each,
    takes_grouped,
    wide_product,
    within_capacity,
)

SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by: sigmoids may all be zero (DeepSeek-V3)."""


class Router(nn.Module):
    """Chooses the experts of each token: [B, S, D] -> weights [B, S, k] and numbers of experts [B, S, k].

    Computes in fp32. Of a sequence that fills an expert beyond its capacity, the smallest weights are
    dropped: their weight is zero, and their expert has the number E. The weights of a token's other experts
    stay as they are.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.experts, spec.hidden))
        bias = torch.zeros(spec.experts, dtype=torch.float32) if spec.router.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.expert_bias: Tensor | None
        self.top_k, self.options = spec.top_k, spec.router
        self.observe: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
        """Sees logits and scores [B, S, E], choices, weights and which of them an expert takes in [B, S, k]
        (None for all), and returns the weights."""

    def logits(self, x: Tensor) -> Tensor:
        return wide_product(x, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        scores = logits.softmax(-1) if self.options.score == "softmax" else logits.sigmoid()
        # Where the chosen alone share the weights, logits choose, as in Megatron-LM.
        late = self.options.score == "softmax" and self.options.normalised and self.expert_bias is None
        chosen = self.choose((logits if late else scores).detach())
        weights = scores.gather(-1, chosen)
        if self.options.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
        if self.options.scale != 1.0:
            weights = weights * self.options.scale
        kept = None
        if self.options.capacity_factor:
            kept = self.within_capacity(weights.detach(), chosen)
        if self.observe is not None:
            weights = self.observe(logits, scores, chosen, weights, kept)
        if kept is not None:
            weights = weights.masked_fill(~kept, 0.0)
            chosen = chosen.masked_fill(~kept, scores.shape[-1])
        return weights, chosen

    def to_device(self, device: torch.device) -> None:
        """Move the biases, which are no parameters, to where routing computes."""
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.to(device)

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token, [B, S, k], by scores or logits [B, S, E] and biases."""
        options = self.options
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if options.groups > 1:
            grouped = scores.view(*scores.shape[:-1], options.groups, -1)
            best = grouped.topk(2, -1).values.sum(-1) if options.group_score == "top2" else grouped.amax(-1)
            open_groups = torch.zeros_like(best, dtype=torch.bool)
            open_groups.scatter_(-1, best.topk(options.top_groups, -1).indices, True)
            scores = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.top_k, -1).indices

    def within_capacity(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """Which pairs of whole sequences their experts take in: [B, S, k] booleans."""
        experts = self.weight.shape[0]
        limit = capacity(weights.shape[1], self.top_k, experts, self.options.capacity_factor)
        return within_capacity(weights, chosen, experts, limit)


class Experts(nn.Module):
    """The experts' networks, stacked: rows [R, D] sorted by expert, and counts [E] -> [R, D]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts, hidden, width = spec.experts, spec.hidden, spec.expert_ffn
        self.width = width
        """Inner width of the part of an expert that is here."""
        shapes = {"up": (width, hidden), "gate": (width, hidden), "down": (hidden, width)}
        for name, shape in shapes.items():
            used = name != "gate" or spec.gated
            weight = nn.Parameter(torch.empty(experts, *shape)) if used else None
            bias = nn.Parameter(torch.empty(experts, shape[0])) if used and spec.linear_bias else None
            self.register_parameter(name, weight)
            self.register_parameter(f"{name}_bias", bias)
        self.activation = Activation(spec)

    def product(self, name: str, rows: Tensor, counts: Tensor, sizes: list[int] | None) -> Tensor:
        """The linear layer `name` of each expert on its rows."""
        return grouped_linear(rows, getattr(self, name), counts, getattr(self, f"{name}_bias"), sizes)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        sizes = None if takes_grouped(rows, rows.shape[1], self.width) else rows_of_each(rows, counts)
        inner = [self.product("up", rows, counts, sizes)]
        if self.gate is not None:
            inner.append(self.product("gate", rows, counts, sizes))
        return self.product("down", self.activation(*inner), counts, sizes)


class MixtureOfExperts(nn.Module):
    """Experts of which each token uses a few, and shared ones that all use: [B, S, D] -> [B, S, D].

    What carries tokens to experts may take its time while the shared experts compute.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec)
        self.shared = MLP(spec, spec.shared_expert_ffn) if spec.shared_expert_ffn else None
        self.shared_gate = nn.Linear(spec.hidden, 1, bias=False) if spec.shared_expert_gate else None
        self.dispatch: Dispatch = LocalDispatch(spec.experts, drops=bool(spec.router.capacity_factor))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        sent = self.dispatch.send(x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1))
        shared = None if self.shared is None else self.shared(x)
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        rows, counts = self.dispatch.receive(sent)
        result = self.dispatch.give_back(sent, self.experts(rows, counts)).view_as(x)
        return result if shared is None else result + shared
