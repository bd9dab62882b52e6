"""Tolerances of the gradients of two layouts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from costmodels import ModelSpec

ROUNDING = 1e-6
"""Relative difference that another order of fp32 sums may leave in the gradient of the last layer."""

DECAYS = ("inputs.rate", "inputs.step_bias", "inputs.decay.weight")
"""Parameters of linear attention whose decays are differences of sums over a chunk."""

CANCELLED = 20
"""The factor of rounding that these differences leave: in fp32 such gradients are 5e-5 off those in fp64."""


def depth_below_loss(spec: ModelSpec, name: str) -> int:
    """Layers that a gradient has passed on its way from the loss."""
    if name.startswith("layers."):
        return spec.layers - int(name.split(".")[1]) + spec.mtp_depths
    if name.startswith("mtp."):
        return spec.mtp_depths - int(name.split(".")[1])
    return spec.layers + 1 if "embedding" in name else 1


def check_gradients(
    spec: ModelSpec, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: float = ROUNDING
) -> None:
    """Assert that every gradient is the expected one up to a rounding that grows with every layer passed.

    The bound is on the norm of the difference over the norm of the gradient. Key biases, which a softmax
    cancels, have no gradient but rounding, and are compared with the norm of the query's.
    """
    for name, gradient in found.items():
        is_copy = name.startswith("further_embedding") or (name == "head.weight" and spec.tied)
        whole = expected["embedding.tokens.weight" if is_copy else name]
        scale = expected[name.replace("key.bias", "query.bias")] if name.endswith("key.bias") else whole
        difference = float((gradient - whole).norm() / scale.norm())
        bound = rounding * (1 + depth_below_loss(spec, name))
        bound *= CANCELLED if name.endswith(DECAYS) else 1
        assert difference <= bound, f"{name}: relative difference {difference:.2e} exceeds {bound:.2e}"
