"""Layers whose weight gradients are added to sums by kernels: routed experts, and linear layers in 8 bits."""

from __future__ import annotations

from torch import Tensor, nn

from costmodels import Layout
from runtime.model.adapters import AdaptedLinear
from runtime.model.experts import Experts, MixtureOfExperts
from runtime.model.routing import takes_grouped
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import local_part
from runtime.parallel.summing_experts import WEIGHTS, keep_experts_in_graphs, sum_experts
from runtime.parallel.summing_linear import PLACE
from runtime.parallel.summing_products import GROUPED, SCALED
from runtime.parallel.summing_trial import Sizes


def kind_of(module: nn.Module, name: str, copy: Tensor) -> str | None:
    """The kind of kernel that adds the gradients of a weight; None if there is none for it."""
    if isinstance(module, Experts):
        inner = local_part(copy.detach()).shape[1:]
        return GROUPED if name in WEIGHTS and takes_grouped(copy.dtype, copy.device, *inner) else None
    if not isinstance(module, nn.Linear) or name != "weight" or isinstance(module, AdaptedLinear):
        return None
    return SCALED if _multiplies_in_8_bits(module) else None


def _multiplies_in_8_bits(linear: nn.Linear) -> bool:
    if "narrow" not in linear._modules:
        # Only then there is a need for what brings PyTorch's compiler.
        return False
    from runtime.parallel.float8_tensorwise import multiplies_narrow

    return multiplies_narrow(linear)


def sizes_of(copy: Tensor, stage: Transformer, layout: Layout, tokens: int) -> Sizes:
    """The sizes of the product that makes a weight's gradient.

    Args:
        tokens: tokens of a microbatch on this rank. Tensor-parallel ranks route different ones of them. Ranks
            that share experts get those of each other.
    """
    shape = local_part(copy.detach()).shape
    if len(shape) == 2:
        return Sizes(1, shape[0], shape[1], tokens)
    (top_k, *_) = {block.mlp.top_k for block in stage.blocks if isinstance(block.mlp, MixtureOfExperts)}
    rows = tokens * top_k * layout.expert_tensor_parallel // layout.tensor_parallel
    return Sizes(shape[0], shape[1], shape[2], rows)


def use_place(module: nn.Module, name: str) -> str:
    """Let a layer compute with the place of its sum, and return that attribute's name."""
    if not isinstance(module, Experts):
        return PLACE
    keep_experts_in_graphs()
    sum_experts(module)
    return f"{name}_{PLACE}"
