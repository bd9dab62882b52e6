"""Initial weights that depend on the seed and a parameter's name only, never on the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from costmodels import ModelSpec

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2; Megatron-LM's `--init-method-std`)."""

OUTPUT_PROJECTIONS = ("attention.output.weight", "mlp.down.weight")
"""Weights that write to the residual stream; GPT-2 scales them down by sqrt(2 x layers)."""


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed of one parameter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def full_weight(name: str, shape: torch.Size, spec: ModelSpec, seed: int, std: float) -> Tensor:
    """The whole initial value of a parameter, on the CPU in fp32.

    Vocabulary rows beyond `spec.vocab` are zero, so that padding changes nothing.
    """
    value = torch.zeros(shape, dtype=torch.float32)
    if name.endswith("bias"):
        return value
    if "norm" in name:
        return value.fill_(1.0)
    if name.endswith(OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * spec.layers)
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    rows = spec.vocab if name in ("embedding.tokens.weight", "head.weight") else shape[0]
    value[:rows].normal_(0.0, std, generator=generator)
    return value


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int, std: float = INIT_STD) -> None:
    """Fill the parameters of `model` (a whole model or a stage, sharded or not) in place.

    A tied head on another stage than the embedding starts from the embedding's value.
    """
    for name, parameter in model.named_parameters():
        source = "embedding.tokens.weight" if spec.tied and name == "head.weight" else name
        value = full_weight(source, parameter.shape, spec, seed, std)
        if isinstance(parameter, DTensor):
            value = value.to(parameter.device)
            local = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            ).to_local()
            parameter.to_local().copy_(local)
        else:
            parameter.copy_(value)
