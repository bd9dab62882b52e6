"""Initial weights, which depend only on the seed and the parameter's name, never on the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from costmodels import ModelSpec
from runtime.model.adapters import DOWN, UP
from runtime.parallel.local_tensors import local_part, split_dim
from runtime.parallel.quantised_base import base_weights

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2; Megatron-LM's `--init-method-std`)."""

FIRST_RATES = 0.01, 16.0
"""Range of the initial decays of linear attention, before their logarithms."""

OUTPUT_PROJECTIONS = (
    "attention.output.weight",
    "mlp.down.weight",
    "mlp.shared.down.weight",
    "mlp.experts.down",
)
"""Weights whose outputs are added to the residual stream; GPT-2 divides them by sqrt(2 x layers)."""


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed of one parameter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def full_weight(
    name: str, shape: torch.Size, spec: ModelSpec, seed: int, std: float, expert: int | None = None
) -> Tensor:
    """The whole initial value of a parameter, or of the part of one `expert`, on the CPU in fp32.

    Vocabulary rows beyond `spec.vocab` are zero, so that padding changes nothing.
    """
    value = torch.zeros(shape, dtype=torch.float32)
    if name.endswith("inputs.step_bias"):
        return value.fill_(1.0)
    if name.endswith(("bias", "sinks", UP)):
        return value
    if name.endswith(DOWN):
        # Kaiming's uniform distribution with a = sqrt(5), as PyTorch's linear layers and peft have it.
        limit = 1 / math.sqrt(shape[1])
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        return value.uniform_(-limit, limit, generator=generator)
    if "norm" in name:
        return value.fill_(0.0 if spec.norm_from_one and "gated_norm" not in name else 1.0)
    if name.endswith("_conv"):
        # That of PyTorch's convolutions.
        std = (3 * shape[1]) ** -0.5
    if name.endswith(OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * spec.layers)
    drawn = name if expert is None else f"{name}.{expert}"
    generator = torch.Generator().manual_seed(name_seed(seed, drawn))
    if name.endswith("inputs.rate"):
        # As Mamba-2's and Gated DeltaNet's published code begin.
        return value.uniform_(*FIRST_RATES, generator=generator).log_()
    rows = spec.vocab if name in ("embedding.tokens.weight", "head.weight") else shape[0]
    value[:rows].normal_(0.0, std, generator=generator)
    return value


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int, std: float = INIT_STD) -> None:
    """Fill the parameters of `model` (a whole model or a stage, sharded or not) in place.

    Copies of the embedding on another stage, such as a tied head, start from its value.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            local_part(parameter).copy_(_own_experts(name, parameter, spec, seed, std))
            continue
        is_copy = name.startswith("further_embedding") or (spec.tied and name == "head.weight")
        source = "embedding.tokens.weight" if is_copy else name
        value = full_weight(source, parameter.shape, spec, seed, std)
        if isinstance(parameter, DTensor):
            value = value.to(parameter.device)
            local = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            ).to_local()
            parameter.to_local().copy_(local)
        else:
            parameter.copy_(value)
    for buffer in model.buffers():
        buffer.zero_()
    for name, weight in base_weights(model):
        value = full_weight(name, weight.shape, spec, seed, std)
        whole = weight.like
        if isinstance(whole, DTensor):
            value = distribute_tensor(
                value.to(weight.codes.device), whole.device_mesh, whole.placements, src_data_rank=None
            ).to_local()
        weight.take(value)


def _own_experts(name: str, parameter: Tensor, spec: ModelSpec, seed: int, std: float) -> Tensor:
    """This rank's part of a parameter of all experts, [E, ...]; only the rank's own experts are drawn."""
    count, first, splits = spec.experts, 0, {}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        own = zip(parameter.placements, mesh.get_coordinate() or (), mesh.shape, strict=True)
        splits = dict(zip(mesh.mesh_dim_names or (), own, strict=True))
    if "ep" in splits:
        _, rank, ranks = splits["ep"]
        count //= ranks
        first = rank * count
    value = torch.stack(
        [
            full_weight(name, parameter.shape[1:], spec, seed, std, expert)
            for expert in range(first, first + count)
        ]
    )
    # FSDP2 splits what expert parallelism has left.
    for name_of_dim in ("etp", "e_shard"):
        placement, rank, ranks = splits.get(name_of_dim, (Replicate(), 0, 1))
        dim = split_dim(placement)
        if dim is not None:
            chunks = value.chunk(ranks, dim)
            value = chunks[rank] if rank < len(chunks) else chunks[0].narrow(dim, 0, 0)
    return value
