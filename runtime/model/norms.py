"""Norms of a layer. Shapes: see `runtime.model`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec


class NormFromOne(nn.RMSNorm):
    """An RMS norm with a weight stored minus one (Gemma), computed in fp32."""

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalised `x` times (1 + `weight`)."""
        # In 16 bits the sum would lose what the weight has learned.
        wide = F.rms_norm(x.float(), self.normalized_shape, 1.0 + weight.float(), self.eps)
        return wide.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.weighted(x, self.weight)


def rms_norm(spec: ModelSpec, width: int, weights: bool = True) -> nn.RMSNorm:
    """The model's RMS norm over `width` elements, with or without `weights`."""
    kind = NormFromOne if spec.norm_from_one and weights else nn.RMSNorm
    return kind(width, eps=spec.norm_eps, elementwise_affine=weights)


def make_norm(spec: ModelSpec) -> nn.Module:
    """The model's norm of width D."""
    if spec.norm == "layernorm":
        return nn.LayerNorm(spec.hidden, eps=spec.norm_eps)
    return rms_norm(spec, spec.hidden)
