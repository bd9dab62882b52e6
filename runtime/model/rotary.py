"""Rotary embedding (RoFormer, arXiv:2104.09864) and its scaling for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from costmodels.errors import InputError
from costmodels.spec.model_parts import RopeScaling


@lru_cache(maxsize=8)
def first_positions(seq: int, device: torch.device) -> Tensor:
    """The positions 0 to `seq` - 1, [S]."""
    return torch.arange(seq, device=device)


def rotary_table(
    positions_S: Tensor, dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, dim] of the `positions_S`, in fp32 (RoFormer, eq. 34).

    The second half repeats the first, as `rotate` needs it. Raises `InputError` for a kind of `scaling` that
    is not in `ROPE_KINDS`.
    """
    angles_SH = torch.outer(positions_S.float(), frequencies(dim, theta, scaling, positions_S.device))
    angles_SH = torch.cat((angles_SH, angles_SH), dim=-1)
    factor = table_factor(scaling)
    return angles_SH.cos() * factor, angles_SH.sin() * factor


def rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_BNSH` after rotary embedding, with halves rotated as in Llama; only the first elements if tables are
    shorter than heads."""
    turned = cos.shape[-1]
    if turned < x_BNSH.shape[-1]:
        return torch.cat((rotate(x_BNSH[..., :turned], cos, sin), x_BNSH[..., turned:]), dim=-1)
    first_BNSh, second_BNSh = x_BNSH.float().chunk(2, dim=-1)
    turned_BNSH = torch.cat((-second_BNSh, first_BNSh), dim=-1)
    return (x_BNSH.float() * cos + turned_BNSH * sin).to(x_BNSH.dtype)


def frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Radians per position by which each pair of a vector of `dim` elements is rotated, [dim / 2].

    Raises `InputError` as `rotary_table`.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain
    if scaling.kind not in ROPE_KINDS:
        raise InputError(
            f"rope_scaling kind {scaling.kind!r} can be planned, not trained: the runtime computes "
            f"{', '.join(ROPE_KINDS)}"
        )
    return ROPE_KINDS[scaling.kind](plain, theta, scaling)


def table_factor(scaling: RopeScaling | None) -> float:
    """The factor of cosines and sines: 1, or the attention factor of YaRN.

    It is sqrt(1/t) = 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4), or, if both are given, DeepSeek's
    ratio of its values with `mscale` and with `mscale_all_dim`; `score_factor` has the rest.
    """
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_scale(scaling.factor, scaling.mscale) / _yarn_scale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _yarn_scale(scaling.factor, 1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """The factor of the score scale in models with latent attention.

    It is (0.1 x mscale_all_dim x ln(factor) + 1)^2, as in the published DeepSeek-V2 and V3: YaRN's factor on
    both queries and keys, also for elements without rotation. It is 1 without `mscale_all_dim`.
    """
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _yarn_scale(scaling.factor, scaling.mscale_all_dim) ** 2


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _linear(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies of position interpolation (arXiv:2306.15595, eq. 4)."""
    return plain / scaling.factor


def _llama3(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies of Llama 3.1's `apply_scaling`: wavelengths above `original / low_freq_factor` are scaled,
    those below `original / high_freq_factor` are kept, and those between are interpolated. Llama 4 Scout has
    the same factor for both."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0) if low < high else (turns >= low).to(plain.dtype)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies of NTK-by-parts interpolation (arXiv:2309.00071, section 3.2): a ramp over the dimensions,
    from those with `beta_fast` turns within the original length (kept) to those with `beta_slow` turns
    (scaled)."""
    dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # A ramp of no width would divide by zero.
    width = last - first or 0.001
    stretched = ((torch.arange(len(plain), device=plain.device) - first) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


ROPE_KINDS: dict[str, Callable[[Tensor, float, RopeScaling], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Functions by kind of scaling: scaled frequencies from plain ones [dim / 2], their base and the scaling."""
