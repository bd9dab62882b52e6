"""Gated DeltaNet (arXiv:2412.06464): attention whose state has one size for any length of sequence.

Shapes: see `runtime.model`; N are heads of values here, K of queries and keys, c tokens of a chunk and n
chunks, Z the size of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec
from costmodels.spec.model_parts import LinearAttention
from runtime.model.attention import CoreAttention, MultiHeadAttention

SMALLEST_NORM = 1e-6
"""Added to the squares of queries and keys, which are brought to length one."""


class DeltaInputs(nn.Module):
    """Queries, keys, values, log decays and strengths of the tokens: [B, S, D] -> [B, N, S, ...] each.

    A convolution over some positions goes over queries, keys and values before their activation.
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
        """Channels after their convolution over positions and its activation, [B, S, I]."""
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
    S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t k_t v_t^T."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk, self.steps = chunk, True

    def forward(  # type: ignore[override]
        self, q_BKSH: Tensor, k_BKSH: Tensor, v_BNSZ: Tensor, decay_BNS: Tensor, strength_BNS: Tensor
    ) -> Tensor:
        result, _ = delta_rule(q_BKSH, k_BKSH, v_BNSZ, decay_BNS, strength_BNS, self.chunk)
        return result


class GatedDelta(MultiHeadAttention):
    """The layer of Qwen3-Next around the rule: [B, S, D] -> [B, S, D]."""

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
        """What the rule takes."""
        taken: tuple[Tensor, ...] = self.inputs(x_BSD)
        return taken

    def merge(self, attended_BNSH: Tensor, x_BSD: Tensor) -> Tensor:
        """The result of all heads, each normalised and then gated by the input."""
        gate_BSI = F.silu(self.gate(x_BSD).float())
        normal_BSNZ = self.gated_norm(attended_BNSH.transpose(1, 2))
        gated_BSI = (normal_BSNZ.flatten(2) * gate_BSI).to(x_BSD.dtype)
        result_BSD: Tensor = self.output(gated_BSI)
        return result_BSD


def unit_length(x: Tensor) -> Tensor:
    """Vectors of length one, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + SMALLEST_NORM)


def delta_rule(
    q_BKSH: Tensor,
    k_BKSH: Tensor,
    v_BNSZ: Tensor,
    decay_BNS: Tensor,
    strength_BNS: Tensor,
    chunk: int,
    state_BNHZ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What queries read, and the last state: chunks of tokens at a time (arXiv:2412.06464, section 3.3).

    Within a chunk the updates of all its tokens are one product with the inverse of a triangle: with G the
    sums of log decays in the chunk, D_ij = exp(G_i - G_j), and A_ij = b_i D_ij k_i k_j below the diagonal,
    new values are (1 + A)^-1 (b v - b exp(G) k S).

    Args:
        decay_BNS: log decays, at most 0.
        strength_BNS: 0 for tokens that leave the state as it is but for its decay.
        chunk: tokens of a chunk; zeros fill up the last one.
        state_BNHZ: before the first token, fp32; zeros if None.

    Returns:
        [B, N, S, Z] in the format of values, and [B, N, H, Z] in fp32.
    """
    seq, repeats = q_BKSH.shape[2], v_BNSZ.shape[1] // q_BKSH.shape[1]
    missing = -seq % chunk

    def chunks(x: Tensor) -> Tensor:
        filled = F.pad(x, (0, 0, 0, missing))
        return filled.reshape(*x.shape[:2], -1, chunk, x.shape[-1])

    q, k = (unit_length(x).repeat_interleave(repeats, dim=1) for x in (q_BKSH, k_BKSH))
    q, k = chunks(q * q.shape[-1] ** -0.5), chunks(k)
    b_BNnc1 = chunks(strength_BNS.float().unsqueeze(-1))
    sums_BNnc1 = chunks(decay_BNS.float().unsqueeze(-1)).cumsum(3)
    later_cc = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # Hidden before the exponent, which would overflow there.
    between_BNncc = (sums_BNnc1 - sums_BNnc1.mT).masked_fill(later_cc, -torch.inf).exp()
    decayed_BNnc1 = sums_BNnc1.exp()
    triangle_BNncc = (k * b_BNnc1) @ k.mT * between_BNncc
    values_BNncZ = chunks(v_BNSZ.float()) * b_BNnc1
    both = torch.cat((values_BNncZ, k * (b_BNnc1 * decayed_BNnc1)), dim=-1)
    # It reads what is below the diagonal, and takes that for ones.
    solved = torch.linalg.solve_triangular(triangle_BNncc, both, upper=False, unitriangular=True)
    new_BNncZ, reads_BNncH = solved.split((v_BNSZ.shape[-1], k.shape[-1]), dim=-1)
    within_BNncc = q @ k.mT * between_BNncc
    q, last_BNn11 = q * decayed_BNnc1, sums_BNnc1[:, :, :, -1:]
    k_left = k * (last_BNn11 - sums_BNnc1).exp()
    kept_BNn11 = last_BNn11.exp()
    if state_BNHZ is None:
        state_BNHZ = new_BNncZ.new_zeros(*v_BNSZ.shape[:2], k.shape[-1], v_BNSZ.shape[-1])
    results = []
    for q_, new, reads, within, left, kept in zip(
        *(x.unbind(2) for x in (q, new_BNncZ, reads_BNncH, within_BNncc, k_left, kept_BNn11)), strict=True
    ):
        corrected = new - reads @ state_BNHZ
        results.append(q_ @ state_BNHZ + within @ corrected)
        state_BNHZ = state_BNHZ * kept + left.mT @ corrected
    read_BNSZ = torch.cat(results, dim=2)[:, :, :seq]
    return read_BNSZ.to(v_BNSZ.dtype), state_BNHZ
