"""Building of this rank's stages: all changes of the model for a layout, in order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from costmodels import Layout, ModelSpec
from costmodels.layers.shapes import experts_are_whole
from costmodels.pytorch import is_at_least
from costmodels.spec.hardware import NARROW
from runtime.model.experts import MixtureOfExperts
from runtime.model.number_formats import DTYPES
from runtime.model.routing import major_of, takes_grouped
from runtime.model.transformer import Block, Transformer
from runtime.parallel.context import context_parallel, local_positions, uses_ring
from runtime.parallel.data import data_parallel, gather_once, needs_data_parallel, wraps_stages
from runtime.parallel.expert import expert_parallel
from runtime.parallel.float8 import float8
from runtime.parallel.initialisation import INIT_STD, initialise
from runtime.parallel.layer_chain import LayerChain
from runtime.parallel.loss import TokenLoss
from runtime.parallel.mesh import Grid
from runtime.parallel.offload import offload_activations
from runtime.parallel.placements import keep_placements
from runtime.parallel.quantised_base import quantise_base
from runtime.parallel.recomputation import recompute, recomputed_blocks, recomputes_units
from runtime.parallel.replicas import replicate
from runtime.parallel.tensor import tensor_parallel
from runtime.parallel.working_copies import WorkingCopies
from runtime.settings.checks import check_job
from runtime.train.executor import Accumulation, Executor


def build_stage(spec: ModelSpec, layout: Layout, grid: Grid, index: int, compiled: bool) -> Transformer:
    """One stage on the meta device, split and wrapped by `layout`."""
    keep_placements()
    with torch.device("meta"):
        stage = Transformer(
            spec,
            spec.padded_vocab(layout.tensor_parallel),
            layout.layer_range(index),
            with_embedding=index == 0,
            with_head=index == len(layout.layers_per_stage) - 1,
        )
    if spec.lora is not None:
        # Frozen weights need no copy in fp32: they compute in the format that they are stored in.
        for parameter in stage.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[layout.precision])
    stage.place(local_positions(spec, layout, grid.cp_rank).to(grid.device))
    if layout.context_parallel > 1:
        context_parallel(stage, layout, grid)
    if layout.tensor_parallel > 1:
        tensor_parallel(stage, layout, grid)
    expert_parallel(stage, layout, grid)
    quantise_base(stage, spec, layout, grid)
    if layout.precision in NARROW:
        float8(stage, "mxfp8" if layout.precision == "mxfp8" else layout.fp8_recipe)
    if compiled:
        _mark_tables(stage)
        for number, block in zip(stage.numbers, stage.blocks, strict=True):
            if isinstance(block.mlp, MixtureOfExperts):
                block.mlp.is_whole = _is_whole(block.mlp, spec, number, layout, grid)
    in_two = compiles_in_two(layout)
    # torch.compile takes checkpoints into its graphs, but none of code that cannot be one graph.
    around = [
        block
        for block in stage.blocks
        if compiled and layout.recompute == "full" and (in_two or not _is_one_graph(block))
    ]
    for block in around:
        _compile(block, in_two)
    if compiled:
        for block in stage.blocks:
            if block not in around:
                _compile_within_experts(block)
    recompute(stage, layout)
    if compiled:
        for block in stage.blocks:
            if block not in around:
                _compile(block, in_two, has_compiled_within=True)
    if layout.offload_activations:
        offload_activations(stage, layout)
    if wraps_stages(layout):
        data_parallel(stage, layout, grid)
    elif needs_data_parallel(layout, grid):
        replicate(stage, grid)
    return stage


def _mark_tables(stage: Transformer) -> None:
    """Tell compilers that position tables have fixed addresses, which affects the tensors kept for backward.
    In modules wrapped by FSDP2, compilers only assume this for parameters."""
    import torch._dynamo

    mark: Any = torch._dynamo.mark_static_address
    for block in stage.blocks:
        for table in block.attention.tables or ():
            mark(table, guard=False)


def compiles_in_two(layout: Layout) -> bool:
    """Return whether a layer is compiled in two parts: before the core of attention, and after it.

    A ring of keys and values cannot be compiled. Attention that offloads its activations is not compiled at
    all, and in a layout with such layers the compiler chooses the graph breaks.
    """
    return uses_ring(layout) and not layout.offload_activations


def _is_one_graph(block: Block) -> bool:
    """Return whether a layer compiles to one graph, if its attention is not a ring."""
    return not (
        block.attention.core.steps or (isinstance(block.mlp, MixtureOfExperts) and not block.mlp.is_whole)
    )


def _is_whole(mixture: MixtureOfExperts, spec: ModelSpec, number: int, layout: Layout, grid: Grid) -> bool:
    """Return whether the layer of a mixture of experts compiles to one graph."""
    dtype, kind = DTYPES[layout.precision], spec.layer_kind(min(number, spec.layers - 1))
    if not experts_are_whole(spec.with_attention(kind.attention), layout):
        return False
    if dtype != torch.bfloat16 and not COMPILES_WIDE:
        return False
    # Compilers cannot ask devices.
    torch.compiler.assume_constant_result(major_of)  # type: ignore[no-untyped-call]
    if not takes_grouped(dtype, grid.device, spec.hidden, mixture.experts.width):
        return False
    _keep_operands_of_grouped_products()
    return True


def _keep_operands_of_grouped_products() -> None:
    """Make Inductor keep the strides of grouped GEMMs' operands as in eager code.

    Otherwise it copies the transposed gradient of rows to a contiguous tensor if a weight gradient is its
    only reader. Then groups are along the contiguous dimension, where CUDA's kernel only supports multiples
    of 16 bytes. PyTorch has such a rule for convolutions, but not for grouped GEMMs (as of 2.14).
    """
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides

    add_layout_constraint(torch.ops.aten._grouped_mm, constrain_to_fx_strides)


COMPILES_WIDE = is_at_least("2.15")
"""The PyTorch version before which compilers only support grouped GEMMs in bf16."""


def _compile_within_experts(block: Block) -> None:
    """Compile the parts of a mixture of experts that cannot be compiled as a whole.

    This comes before the wrapping of recomputation, so that tensors kept by compiled code are dropped as
    well.
    """
    if isinstance(block.mlp, MixtureOfExperts) and not block.mlp.is_whole:
        shared = block.mlp.shared
        if shared is not None:
            shared.forward = torch.compile(shared.forward)  # type: ignore[method-assign]
        activation = block.mlp.experts.activation
        activation.forward = torch.compile(activation.forward, dynamic=True)  # type: ignore[method-assign]


def _compile(block: Block, in_two: bool, has_compiled_within: bool = False) -> None:
    """Compile a layer. Code that depends on an expert's number of rows, and attention that processes a
    sequence in steps, are not compiled."""
    if block.attention.core.steps:
        steps = block.attention.core
        plain_steps: Any = torch.compiler.disable(steps.forward)  # type: ignore[no-untyped-call]
        steps.forward = plain_steps  # type: ignore[method-assign]
    if isinstance(block.mlp, MixtureOfExperts) and not block.mlp.is_whole:
        if not has_compiled_within:
            _compile_within_experts(block)
        plain: Any = torch.compiler.disable(block.mlp.forward)  # type: ignore[no-untyped-call]
        block.mlp.forward = plain  # type: ignore[method-assign]
    if not in_two:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        return
    core = block.attention.core
    before, after = torch.compile(block.up_to_core), torch.compile(block.from_core)

    def forward(x_BSD: Tensor) -> Tensor:
        result_BSD: Tensor = after(x_BSD, core(*before(x_BSD)))
        return result_BSD

    block.forward = forward  # type: ignore[method-assign]


def _chain_layers(stage: Transformer, spec: ModelSpec, layout: Layout, copies: WorkingCopies) -> None:
    """Run neighbouring compiled layers as chains, if they are equal and each is one graph."""
    if compiles_in_two(layout) or layout.offload_activations or recomputes_units(layout):
        return
    again = set(recomputed_blocks(stage, layout))
    kinds = [(spec.layer_kind(int(index)), block in again) for index, block in stage.layers.items()]
    runs: list[Callable[[Tensor], Tensor]] = []
    for _, pairs in groupby(zip(kinds, stage.stack, strict=True), key=itemgetter(0)):
        alike = [block for _, block in pairs]
        chained = len(alike) > 1 and all(_is_one_graph(block) for block in alike)
        runs += [LayerChain(alike, copies).run] if chained else alike

    def run_layers(x_BSD: Tensor) -> Tensor:
        for run in runs:
            x_BSD = run(x_BSD)
        return x_BSD

    stage.run_layers = run_layers  # type: ignore[method-assign]


def build_executor(
    spec: ModelSpec,
    layout: Layout,
    grid: Grid,
    seed: int,
    init_std: float = INIT_STD,
    compiled: bool = False,
) -> Executor:
    """Build, split and initialise the stages of this rank.

    Weights are drawn after splitting, into memory for this rank's part only.
    """
    check_job(spec, layout, dist.get_world_size())
    stages = []
    for index in layout.stages_of(grid.pp_rank):
        stage = build_stage(spec, layout, grid, index, compiled)
        # FSDP2 keeps shards in host memory whose optimizer state is there.
        stage.to_empty(device="cpu" if layout.offload_optimizer else grid.device)
        for router in stage.routers.values():
            router.to_device(grid.device)
        stage.tie()
        initialise(stage, spec, seed, init_std)
        stages.append(stage)
    float8_gather = None
    if layout.gathers_fp8:
        # GEMMs of gathered fp8 weights bring PyTorch's compiler, which no other layout need wait for.
        from runtime.parallel.float8_gather import Float8Gather

        float8_gather = Float8Gather(stages, layout)
    for stage in stages:
        if isinstance(stage, FSDPModule):
            gather_once(stage)
    executor = executor_of(stages, spec, layout, grid, compiled)
    executor.float8_gather = float8_gather
    return executor


def executor_of(
    stages: list[Transformer], spec: ModelSpec, layout: Layout, grid: Grid, compiled: bool = False
) -> Executor:
    """The executor that runs the microbatches of `stages`."""
    loss = TokenLoss(spec, layout, grid, compiled)
    copies = []
    if not wraps_stages(layout):
        tokens = layout.micro_batch_size * spec.seq // layout.context_parallel
        copies = [WorkingCopies(stage, layout, compiled, tokens) for stage in stages]
    if compiled:
        for stage, own in zip(stages, copies, strict=False):
            _chain_layers(stage, spec, layout, own)
    if layout.pipeline_parallel == 1:
        return Accumulation(stages, layout, loss, copies)
    # PyTorch's schedules bring its compiler: seconds, which only pipelines need wait for.
    from runtime.parallel.pipeline import Pipeline

    return Pipeline(stages, spec, layout, grid, loss, copies)
