"""The mixture of experts of a layer: router, experts, shared experts.

Shapes: see `runtime.model`.
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
    capacity_mask,
    grouped_linear,
    row_counts,
    takes_grouped,
    wide_product,
)

SMALLEST_SUM = 1e-20
"""Term added to the sum by which weights are divided, as all sigmoids may be zero (DeepSeek-V3)."""


class Router(nn.Module):
    """The router, which chooses the experts of each token: [B, S, D] -> weights [B, S, k] and numbers of
    experts [B, S, k].

    Computes in fp32. If a sequence exceeds the capacity of an expert, the pairs with the smallest weights are
    dropped: their weight becomes zero, and their expert gets the number E. The weights of a token's other
    experts are unchanged.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.experts, spec.hidden))
        self.bias = nn.Parameter(torch.empty(spec.experts)) if spec.router.bias else None
        bias = torch.zeros(spec.experts, dtype=torch.float32) if spec.router.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.expert_bias: Tensor | None
        self.register_buffer("load", torch.zeros(spec.experts, dtype=torch.int64), persistent=False)
        self.load: Tensor
        """Counts of how often each expert was chosen, for `observe`."""
        self.top_k, self.options = spec.top_k, spec.router
        self.observe: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
        """Sees the load [E], logits and scores [B, S, E], choices, weights and which of them an expert takes
        in, [B, S, k] (None for all), and returns the weights."""

    def logits(self, x_BSD: Tensor) -> Tensor:
        """The scores of all experts, [B, S, E]."""
        return self.product(x_BSD, self.weight, self.bias)

    @staticmethod
    def product(x_BSD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        """The logits for a given matrix and bias."""
        logits_BSE = wide_product(x_BSD, weight_ED)
        return logits_BSE if bias_E is None else logits_BSE + bias_E.float()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        logits_BSE = self.logits(x_BSD)
        scores_BSE = logits_BSE.softmax(-1) if self.options.score == "softmax" else logits_BSE.sigmoid()
        # Logits choose where weights are normalised over the chosen experts, as in Megatron-LM.
        late = self.options.score == "softmax" and self.options.normalised and self.expert_bias is None
        chosen_BSk = self.choose((logits_BSE if late else scores_BSE).detach())
        weights_BSk = scores_BSE.gather(-1, chosen_BSk)
        if self.options.normalised:
            weights_BSk = weights_BSk / (weights_BSk.sum(-1, keepdim=True) + SMALLEST_SUM)
        if self.options.scale != 1.0:
            weights_BSk = weights_BSk * self.options.scale
        kept_BSk = None
        if self.options.capacity_factor:
            kept_BSk = self.capacity_mask(weights_BSk.detach(), chosen_BSk)
        if self.observe is not None:
            weights_BSk = self.observe(self.load, logits_BSE, scores_BSE, chosen_BSk, weights_BSk, kept_BSk)
        if kept_BSk is not None:
            weights_BSk = weights_BSk.masked_fill(~kept_BSk, 0.0)
            chosen_BSk = chosen_BSk.masked_fill(~kept_BSk, scores_BSE.shape[-1])
        return weights_BSk, chosen_BSk

    def to_device(self, device: torch.device) -> None:
        """Move load and biases, which are not parameters, to the device of the computation."""
        self.load = self.load.to(device)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.to(device)

    def choose(self, scores_BSE: Tensor) -> Tensor:
        """The experts of each token, [B, S, k], by scores or logits [B, S, E] and biases."""
        options = self.options
        if self.expert_bias is not None:
            scores_BSE = scores_BSE + self.expert_bias
        if options.groups > 1:
            grouped_BSGe = scores_BSE.view(*scores_BSE.shape[:-1], options.groups, -1)
            top2 = options.group_score == "top2"
            best_BSG = grouped_BSGe.topk(2, -1).values.sum(-1) if top2 else grouped_BSGe.amax(-1)
            open_BSG = torch.zeros_like(best_BSG, dtype=torch.bool)
            open_BSG.scatter_(-1, best_BSG.topk(options.top_groups, -1).indices, True)
            scores_BSE = grouped_BSGe.masked_fill(~open_BSG.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores_BSE.topk(self.top_k, -1).indices

    def capacity_mask(self, weights_BSk: Tensor, chosen_BSk: Tensor) -> Tensor:
        """A mask [B, S, k] of the pairs of whole sequences within the capacity of their experts."""
        experts = self.weight.shape[0]
        limit = capacity(weights_BSk.shape[1], self.top_k, experts, self.options.capacity_factor)
        return capacity_mask(weights_BSk, chosen_BSk, experts, limit)


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

    def product(self, name: str, rows: Tensor, counts_E: Tensor, sizes: list[int] | None) -> Tensor:
        """The linear layer `name` of each expert on its rows."""
        return self.linear(name, rows, getattr(self, name), counts_E, getattr(self, f"{name}_bias"), sizes)

    def linear(
        self,
        name: str,
        rows: Tensor,
        weight: Tensor,
        counts_E: Tensor,
        bias: Tensor | None,
        sizes: list[int] | None,
    ) -> Tensor:
        """The linear layer `name` of each expert, by the parts of its parameters that are here."""
        return grouped_linear(rows, weight, counts_E, bias, sizes)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        grouped = takes_grouped(rows_RD.dtype, rows_RD.device, rows_RD.shape[1], self.width)
        sizes = None if grouped else row_counts(rows_RD, counts_E)
        inner_RF = [self.product("up", rows_RD, counts_E, sizes)]
        if self.gate is not None:
            inner_RF.append(self.product("gate", rows_RD, counts_E, sizes))
        return self.product("down", self.activation(*inner_RF), counts_E, sizes)


class MixtureOfExperts(nn.Module):
    """Routed experts, of which each token uses a few, and shared experts for all tokens: [B, S, D] -> [B, S,
    D].

    Dispatch overlaps with the computation of the shared experts.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec)
        self.shared = MLP(spec, spec.shared_expert_ffn) if spec.shared_expert_ffn else None
        self.shared_gate = nn.Linear(spec.hidden, 1, bias=False) if spec.shared_expert_gate else None
        self.dispatch: Dispatch = LocalDispatch(spec.experts, drops=bool(spec.router.capacity_factor))
        self.is_whole = False
        """A compiler takes the whole layer."""
        self.weighs_inputs, self.top_k = spec.router.weighs_inputs, spec.top_k

    def forward(self, x_BSD: Tensor) -> Tensor:
        sent = self.dispatch.send(*self.weighted_tokens(x_BSD))
        shared_BSD = None if self.shared is None else self.shared(x_BSD)
        if shared_BSD is not None and self.shared_gate is not None:
            shared_BSD = shared_BSD * self.shared_gate(x_BSD).sigmoid()
        rows_RD, counts_E = self.dispatch.receive(sent)
        result_BSD = self.dispatch.give_back(sent, self.experts(rows_RD, counts_E))
        if self.weighs_inputs and self.top_k > 1:
            result_BSD = result_BSD.view(-1, self.top_k, result_BSD.shape[-1]).sum(1)
        result_BSD = result_BSD.view_as(x_BSD)
        return result_BSD if shared_BSD is None else result_BSD + shared_BSD

    def weighted_tokens(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [T, D], and the weights and experts [T, k] of each.

        If weights multiply the inputs of experts, a token becomes k tokens with one expert each, [T k, D].
        """
        weights_Tk, chosen_Tk = (part.flatten(0, 1) for part in self.router(x_BSD))
        x_TD = x_BSD.flatten(0, 1)
        if not self.weighs_inputs:
            return x_TD, weights_Tk, chosen_Tk
        weighed_TkD = x_TD.unsqueeze(1) * weights_Tk.unsqueeze(-1).to(x_TD.dtype)
        return weighed_TkD.flatten(0, 1), torch.ones_like(weights_Tk).view(-1, 1), chosen_Tk.view(-1, 1)
