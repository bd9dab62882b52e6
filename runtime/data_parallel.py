"""Share the parameters of one stage over data- and context-parallel ranks: ZeRO 0 to 3 by FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from costmodels import Layout
from runtime.grid import Grid
from runtime.model import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Number formats that activations have; fp8 is one of matrix products only."""

# The loss reads the logits of a split head, a view, and never writes to them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def needs_data_parallel(layout: Layout) -> bool:
    """Whether `layout` wraps its stages: to share work, or to keep fp32 shards apart from what computes."""
    shares = layout.data_parallel * layout.context_parallel > 1
    return shares or layout.precision != "fp32" or layout.offload_optimizer


def data_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Shard (ZeRO 1 to 3) or replicate (ZeRO 0) `stage` with FSDP2, or both (hybrid).

    Gradients are summed, not averaged: the loss is already divided by the tokens of the global batch. Those
    of several micro batches are added up in the format of the reduction too, as with Megatron-LM's
    `--grad-reduce-in-bf16`; the optimizer always sees fp32.

    When the optimizer is offloaded, the fp32 shards lie in host memory. FSDP2 copies them to the device
    before it gathers parameters, and gradients back once they are reduced.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout.precision], reduce_dtype=DTYPES[layout.gradient_reduction]
    )
    shards_only = layout.zero_stage > 0 and layout.zero_replicas == 1
    mesh = grid.mesh["dp_shard"] if shards_only else grid.mesh[("dp_replicate", "dp_shard")]
    offload = CPUOffloadPolicy(pin_memory=grid.device.type == "cuda") if layout.offload_optimizer else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": offload or OffloadPolicy(),
    }
    frees = layout.zero_stage == 3
    for block in stage.blocks:
        fully_shard(block, reshard_after_forward=frees, **options)
    # Embedding and head are the first that backward gathers: PyTorch's default keeps them.
    fully_shard(stage, reshard_after_forward=None if frees else False, **options)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def settle_shards(stage: Transformer) -> None:
    """Gather and free once: FSDP2 moves uneven shards into padded storage on first use only."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
