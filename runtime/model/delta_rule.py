"""The gated delta rule over chunks of tokens (arXiv:2412.06464, section 3.3), as GEMMs of all chunks at once.

Shapes: see `runtime.model`; N are heads of values here, K of queries and keys, c tokens of a chunk, n chunks
and Z the size of a value. X are the heads of values of all sequences, B N, and Y those of keys, B K.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_NORM = 1e-6
"""Term added to the squared length of queries and keys in their normalisation."""


def wide(x: Tensor) -> Tensor:
    """A tensor in fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def unit_length(x: Tensor) -> Tensor:
    """Vectors normalised to length one, in fp32."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + SMALLEST_NORM)


def delta_rule(
    q_BKSH: Tensor,
    k_BKSH: Tensor,
    v_BNSZ: Tensor,
    decay_BNS: Tensor,
    strength_BNS: Tensor,
    chunk: int,
    state_BNHZ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output values of the delta rule, and the last state, computed in chunks of tokens.

    Within a chunk the updates of all tokens are one GEMM with the inverse of a triangular matrix. G are the
    sums of log decays in the chunk, D_ij = exp(G_i - G_j), and A_ij = b_i D_ij k_i k_j below the diagonal.
    New values are then (1 + A)^-1 (b v - b exp(G) k S). Only the terms with the state S depend on earlier
    chunks.

    Args:
        decay_BNS: log decays, at most 0.
        strength_BNS: 0 for tokens that only decay the state.
        chunk: tokens of a chunk; zeros fill up the last one.
        state_BNHZ: before the first token, fp32; zeros if None.

    Returns:
        [B, N, S, Z] in the format of values, and [B, N, H, Z] in fp32.
    """
    batch, heads, seq, value = v_BNSZ.shape
    repeats, missing = heads // k_BKSH.shape[1], -seq % chunk

    def chunks(x: Tensor) -> Tensor:
        """[B, K, S, ...] -> [n, Y, c, ...], and so for X."""
        filled = F.pad(x, (0, 0, 0, missing)) if missing else x
        return _split(filled, 2, chunk).permute(2, 0, 1, 3, 4).contiguous().flatten(1, 2)

    def each(shared: Tensor, own: Tensor) -> Tensor:
        """Products of tensors of key heads, repeated for the value heads that share them, and tensors of
        value heads."""
        return (shared.unsqueeze(2) * _split(own, 1, repeats)).flatten(1, 2)

    q_nYcH, k_nYcH = chunks(unit_length(q_BKSH) * q_BKSH.shape[-1] ** -0.5), chunks(unit_length(k_BKSH))
    v_nXcZ, b_nXc1 = chunks(wide(v_BNSZ)), chunks(wide(strength_BNS).unsqueeze(-1))
    sums_nXc1 = chunks(wide(decay_BNS).unsqueeze(-1)).cumsum(2)
    decayed_nXc1, last_nX11 = sums_nXc1.exp(), sums_nXc1[:, :, -1:]
    later_cc = torch.ones(chunk, chunk, dtype=torch.bool, device=v_BNSZ.device).triu(1)
    # Hidden before the exponent, which would overflow there.
    between_nXcc = (sums_nXc1 - sums_nXc1.mT).masked_fill(later_cc, -torch.inf).exp()
    inverse_nXcc = _Inverse.apply(each(k_nYcH @ k_nYcH.mT, between_nXcc * b_nXc1)) * b_nXc1.mT
    if state_BNHZ is None:
        state_BNHZ = v_nXcZ.new_zeros(batch, heads, k_nYcH.shape[-1], value)
    new_nXcZ, states_nXHZ, last_XHZ = scan(
        inverse_nXcc @ v_nXcZ,
        inverse_nXcc @ each(k_nYcH, decayed_nXc1),
        each(k_nYcH, (last_nX11 - sums_nXc1).exp()),
        last_nX11.exp(),
        state_BNHZ.flatten(0, 1),
    )
    within_nXcc = each(q_nYcH @ k_nYcH.mT, between_nXcc)
    read_nXcZ: Tensor = each(q_nYcH, decayed_nXc1) @ states_nXHZ + within_nXcc @ new_nXcZ
    read_BNSZ = _split(read_nXcZ, 1, heads).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq]
    return read_BNSZ.to(v_BNSZ.dtype), _split(last_XHZ, 0, heads)


def _split(x: Tensor, dim: int, inner: int) -> Tensor:
    """A tensor with a dimension split in two, the inner one of `inner` elements."""
    return x.reshape(*x.shape[:dim], -1, inner, *x.shape[dim + 1 :])


class _Inverse(torch.autograd.Function):
    """The inverse of unit lower triangular matrices [..., c, c]; only the part below the diagonal is read."""

    @staticmethod
    def forward(ctx: Any, triangle: Tensor) -> Tensor:
        ones = torch.eye(triangle.shape[-1], dtype=triangle.dtype, device=triangle.device).expand_as(triangle)
        inverse: Tensor = torch.linalg.solve_triangular(triangle, ones, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        result: Tensor = -(inverse.mT @ grad @ inverse.mT).tril(-1)
        return result


# One operator for compilers, whose graphs else grow with the number of chunks, and their time with it.
@torch.library.custom_op("planner::delta_scan", mutates_args=())
def scan(
    values_nXcZ: Tensor, reads_nXcH: Tensor, left_nXcH: Tensor, kept_nX11: Tensor, state_XHZ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence over chunks: new_i = values_i - reads_i S_i, S_i+1 = kept_i S_i + left_i^T new_i.

    Three kernels for each chunk. Returns new values [n, X, c, Z], the states S_i before each chunk [n, X, H,
    Z] and the last state [X, H, Z].
    """
    new_nXcZ, chunks = torch.empty_like(values_nXcZ), len(values_nXcZ)
    states = values_nXcZ.new_empty(chunks, *state_XHZ.shape)
    last_XHZ = torch.empty_like(state_XHZ, memory_format=torch.contiguous_format)
    left_nXHc = left_nXcH.mT
    states[0] = state_XHZ
    for i, (state, following) in enumerate(zip(states, [*states[1:], last_XHZ], strict=True)):
        torch.baddbmm(values_nXcZ[i], reads_nXcH[i], state, alpha=-1, out=new_nXcZ[i])
        torch.mul(state, kept_nX11[i], out=following)
        following.baddbmm_(left_nXHc[i], new_nXcZ[i])
    return new_nXcZ, states, last_XHZ


@scan.register_fake
def _(
    values_nXcZ: Tensor, reads_nXcH: Tensor, left_nXcH: Tensor, kept_nX11: Tensor, state_XHZ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    states = values_nXcZ.new_empty(len(values_nXcZ), *state_XHZ.shape)
    last_XHZ = torch.empty_like(state_XHZ, memory_format=torch.contiguous_format)
    return torch.empty_like(values_nXcZ), states, last_XHZ


@torch.library.custom_op("planner::delta_scan_backward", mutates_args=())
def scan_backward(
    to_new_nXcZ: Tensor,
    to_states_nXHZ: Tensor,
    to_last_XHZ: Tensor,
    reads_nXcH: Tensor,
    left_nXcH: Tensor,
    kept_nX11: Tensor,
) -> tuple[Tensor, Tensor]:
    """Complete gradients of new values [n, X, c, Z] and of the states before each chunk and after the last
    one [n + 1, X, H, Z], from the partial gradients of their other readers. Three kernels for each chunk."""
    values = to_new_nXcZ.clone(memory_format=torch.contiguous_format)
    states = torch.cat((to_states_nXHZ, to_last_XHZ.unsqueeze(0)))
    reads_nXHc = reads_nXcH.mT
    for i in reversed(range(len(values))):
        values[i].baddbmm_(left_nXcH[i], states[i + 1])
        states[i].addcmul_(states[i + 1], kept_nX11[i])
        states[i].baddbmm_(reads_nXHc[i], values[i], alpha=-1)
    return values, states


@scan_backward.register_fake
def _(
    to_new_nXcZ: Tensor,
    to_states_nXHZ: Tensor,
    to_last_XHZ: Tensor,
    reads_nXcH: Tensor,
    left_nXcH: Tensor,
    kept_nX11: Tensor,
) -> tuple[Tensor, Tensor]:
    chunks, *shape = to_states_nXHZ.shape
    values = torch.empty_like(to_new_nXcZ, memory_format=torch.contiguous_format)
    return values, to_states_nXHZ.new_empty(chunks + 1, *shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, reads_nXcH, left_nXcH, kept_nX11, _ = inputs
    new_nXcZ, states_nXHZ, _ = output
    ctx.save_for_backward(reads_nXcH, left_nXcH, kept_nX11, new_nXcZ, states_nXHZ)


def _gradients(ctx: Any, to_new_nXcZ: Tensor, to_states_nXHZ: Tensor, to_last_XHZ: Tensor) -> tuple[Any, ...]:
    reads_nXcH, left_nXcH, kept_nX11, new_nXcZ, states_nXHZ = ctx.saved_tensors
    values, states = scan_backward(to_new_nXcZ, to_states_nXHZ, to_last_XHZ, reads_nXcH, left_nXcH, kept_nX11)
    after = states[1:]
    to_kept = (after * states_nXHZ).sum((-2, -1), keepdim=True)
    return values, -values @ states_nXHZ.mT, new_nXcZ @ after.mT, to_kept, states[0]


scan.register_autograd(_gradients, setup_context=_keep)
