"""Split the matrices of one stage over tensor-parallel ranks."""

from __future__ import annotations

from torch import nn
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


def tensor_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Split the matrices of `stage` (Megatron-LM, arXiv:1909.08053, section 3).

    With sequence parallelism, norms and residuals hold S/tp tokens (arXiv:2205.05198, section 4.2.2);
    activations between stages are split the same way.
    """
    sequence_parallel = layout.sequence_parallel
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
    parallelize_module(stage, grid.mesh["tp"], plan)
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
