"""Split one stage of the model over tensor-parallel and data-parallel ranks."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from costmodels import Layout
from runtime.grid import Grid
from runtime.model import Block, Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Number formats that layers compute in."""

# The loss reads the logits of a split head, a view, and never writes to them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def tensor_parallel(stage: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split the matrices of `stage` over `mesh` (Megatron-LM, arXiv:1909.08053, section 3).

    With `sequence_parallel`, norms and residuals hold S/tp tokens (arXiv:2205.05198, section 4.2.2);
    activations between stages are split the same way.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if stage.embedding is not None:
        plan["embedding.tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if stage.embedding.positions is not None and sequence_parallel:
            plan["embedding.positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    for index, block in stage.layers.items():
        plan |= {f"layers.{index}.{name}": style for name, style in _block_plan(block, between).items()}
    if stage.head is not None:
        plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1))
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
    parallelize_module(stage, mesh, plan)
    stage.tie()


def _block_plan(block: nn.Module, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    assert isinstance(block, Block)
    whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attention": whole,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp": whole,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if block.mlp.gate is not None:
        plan["mlp.gate"] = ColwiseParallel()
    if isinstance(between, Shard):
        plan["attention_norm"] = plan["mlp_norm"] = SequenceParallel()
    return plan


def needs_data_parallel(layout: Layout) -> bool:
    """Whether `layout` wraps its stages: to share work, or to keep fp32 copies of 16-bit parameters."""
    return layout.data_parallel > 1 or layout.precision != "fp32"


def data_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Shard (ZeRO 1 to 3) or replicate (ZeRO 0) `stage` over data-parallel ranks with FSDP2.

    Gradients are summed, not averaged: the loss is already divided by the tokens of the global batch.
    """
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[layout.precision], reduce_dtype=torch.float32)
    dims = ("dp_replicate", "dp_shard") if layout.zero_stage == 0 else ("dp_shard",)
    mesh = grid.mesh[dims] if len(dims) > 1 else grid.mesh[dims[0]]
    reshard = layout.zero_stage == 3
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(stage, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
