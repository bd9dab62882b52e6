"""Gated DeltaNet (arXiv:2412.06464): attention with a state of fixed size for any length of sequence.

Shapes: see `runtime.model`; N are heads of values here, K of queries and keys, Z the size of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec
from costmodels.spec.model_parts import LinearAttention
from runtime.model.attention import CoreAttention, MultiHeadAttention
from runtime.model.delta_rule import delta_rule
from runtime.model.flash_linear_attention import chunked_kernel, flash_delta_rule, takes


class DeltaInputs(nn.Module):
    """Queries, keys, values, log decays and strengths of the tokens: [B, S, D] -> [B, N, S, ...] each.

    Queries, keys and values pass a convolution over a few positions before their activation.
    """

    def __init__(self, spec: ModelSpec, sizes: LinearAttention) -> None:
        super().__init__()
        widths = {"query": sizes.key_size, "key": sizes.key_size, "value": sizes.value_size}
        for name, width in widths.items():
            self.add_module(name, nn.Linear(spec.hidden, width, bias=False))
            # Not a module of its own: rows are channels, as those of the matrix before it.
            self.register_parameter(f"{name}_conv", nn.Parameter(torch.empty(width, sizes.conv_kernel)))
        self.strength = nn.Linear(spec.hidden, sizes.value_heads, bias=False)
        self.decay = nn.Linear(spec.hidden, sizes.value_heads, bias=False)
        self.rate = nn.Parameter(torch.empty(sizes.value_heads))
        self.step_bias = nn.Parameter(torch.empty(sizes.value_heads))
        self.heads = {"query": sizes.key_dim, "key": sizes.key_dim, "value": sizes.value_dim}
        """Elements of a head of each."""

    def weight(self, name: str) -> Tensor:
        """This rank's part of a parameter."""
        found: Tensor = getattr(self, name)
        return found

    def mixed(self, name: str, projected_BSI: Tensor) -> Tensor:
        """Channels after the convolution over positions and the activation, [B, S, I]."""
        before = self.weight(f"{name}_conv").shape[1] - 1
        return self.convolved(name, F.pad(projected_BSI, (0, 0, before, 0)))

    def convolved(self, name: str, x_BSI: Tensor) -> Tensor:
        """Channels after their convolution and activation; inputs begin with the positions before the first
        one."""
        kernel = self.weight(f"{name}_conv")
        mixed_BIS = F.conv1d(x_BSI.transpose(1, 2), kernel.unsqueeze(1), groups=kernel.shape[0])
        return F.silu(mixed_BIS).transpose(1, 2)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (
            self.mixed(name, getattr(self, name)(x_BSD)).view(*x_BSD.shape[:2], -1, size).transpose(1, 2)
            for name, size in self.heads.items()
        )
        return q, k, v, *self.gates(x_BSD)

    def gates(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Log decays and strengths [B, N, S] in fp32."""
        step_BSN = F.softplus(self.decay(x_BSD).float() + self.weight("step_bias").float())
        decay_BSN = -self.weight("rate").float().exp() * step_BSN
        return decay_BSN.transpose(1, 2), self.strength(x_BSD).float().sigmoid().transpose(1, 2)


class DeltaCore(CoreAttention):
    """The gated delta rule over whole sequences (equation 10): queries read the state
    S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t k_t v_t^T.

    The kernels of flash-linear-attention are used where possible; they cause graph breaks in compilers.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.steps = self.has_kernel = chunked_kernel() is not None

    def forward(  # type: ignore[override]
        self, q_BKSH: Tensor, k_BKSH: Tensor, v_BNSZ: Tensor, decay_BNS: Tensor, strength_BNS: Tensor
    ) -> Tensor:
        if self.has_kernel and takes(v_BNSZ):
            return flash_delta_rule(q_BKSH, k_BKSH, v_BNSZ, decay_BNS, strength_BNS)
        result, _ = delta_rule(q_BKSH, k_BKSH, v_BNSZ, decay_BNS, strength_BNS, self.chunk)
        return result


class GatedDelta(MultiHeadAttention):
    """Qwen3-Next's layer around the delta rule: [B, S, D] -> [B, S, D]."""

    core: DeltaCore

    def __init__(self, spec: ModelSpec, sizes: LinearAttention) -> None:
        super().__init__()
        self.inputs = DeltaInputs(spec, sizes)
        self.gate = nn.Linear(spec.hidden, sizes.value_size, bias=False)
        self.core = DeltaCore(sizes.chunk)
        self.gated_norm = nn.RMSNorm(sizes.value_dim, eps=spec.norm_eps)
        self.output = nn.Linear(sizes.value_size, spec.hidden, bias=False)
        self.rotates, self.make_tables, self.tables = False, None, None

    def heads(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the delta rule."""
        taken: tuple[Tensor, ...] = self.inputs(x_BSD)
        return taken

    def merge(self, attended_BNSH: Tensor, x_BSD: Tensor) -> Tensor:
        """The combined output of all heads, each normalised and then gated by the input."""
        gate_BSI = F.silu(self.gate(x_BSD).float())
        normal_BSNZ = self.gated_norm(attended_BNSH.transpose(1, 2))
        gated_BSI = (normal_BSNZ.flatten(2) * gate_BSI).to(x_BSD.dtype)
        result_BSD: Tensor = self.output(gated_BSI)
        return result_BSD
