"""Host time of a layer and microbatch: `python -m benchmarks.host_time [--only TEXT] [--json]`.

Tensors are tiny, so that almost only the host's time for each layer is measured, forward and backward. On a
fast GPU, small models wait for the host. Models of two depths train the same microbatches; the difference of
their times is the time of the additional layers. Only processor time of the training thread counts, without
waiting for other ranks and without other programs.

Each layout is compared with plain PyTorch around the same layers: a loop with autocast on one rank, DDP for
ZeRO 0, and FSDP2 for ZeRO 1 to 3. Tensor parallelism is PyTorch's own. Compiled, the loop and DDP have one
graph for the whole model, FSDP2 and tensor parallelism one for each layer, as usual for each of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from shutil import which
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.host_trace import BLOCKS, DENSE, DEPTHS, MICRO_BATCHES, WARM_UP
from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.options.flags import run
from runtime.settings.checks import check_job
from tests.support.layouts import parse_layout
from tests.support.worker_pool import WorkerPool

LAYOUTS = ("dp=1", *(f"dp=2,zero={stage}" for stage in range(4)), "tp=2", "tp=2,sp=1")

Step = Callable[[np.ndarray], object]

Contestant = Callable[[ModelSpec, Layout, bool], Step]
"""Makes the step of a model and layout, compiled or not."""


class Row(NamedTuple):
    """Milliseconds of one layout."""

    block: str
    layout: str
    compiled: bool
    host_ms: float
    """Milliseconds of the host for a layer and microbatch, forward and backward."""
    plain_ms: float | None
    """Milliseconds of the host in plain PyTorch; None if it has no equivalent."""

    @property
    def ratio(self) -> float | None:
        """Our milliseconds over those of plain PyTorch."""
        return None if self.plain_ms is None else self.host_ms / self.plain_ms


def row(block: str, text: str, compiled: bool, rounds: int) -> Row:
    """The row of a block and layout, compiled or not."""
    _, layout = layout_of(BLOCKS[block], text, DEPTHS[-1])
    pool = WorkerPool(layout.world_size)
    by_rank = pool.run(host_times, layout.world_size, block, text, compiled, rounds)
    # The slowest rank: the others wait for it.
    plain = max((one.plain for one in by_rank if one.plain is not None), default=None)
    return Row(block, text, compiled, max(one.ours for one in by_rank), plain)


def layout_of(spec: ModelSpec, text: str, layers: int) -> tuple[ModelSpec, Layout]:
    """A model with this many layers, and the layout of `text` for it in bf16."""
    deep = spec.model_copy(update={"layers": layers})
    ranks = parse_layout(text, deep).data_parallel
    layout = parse_layout(f"{text},precision=bf16,mbs=1,gbs={ranks * MICRO_BATCHES}", deep)
    check_job(deep, layout, layout.world_size)
    return deep, layout


class Times(NamedTuple):
    """Milliseconds of a layer and microbatch on one rank."""

    ours: float
    plain: float | None


def host_times(block: str, text: str, compiled: bool, rounds: int) -> Times:
    """Times of the runtime and of plain PyTorch; runs on every rank."""
    import torch

    torch._dynamo.config.cache_size_limit = 64
    # oneDNN's GEMMs of small matrices in 16 bits take several times the host's own time for them.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    contestants: list[Contestant] = [_trainer]
    # PyTorch's tensor parallelism has no plan for experts, and autocast around compiled layers of it fails.
    if "tp" not in text or (block == "dense" and not compiled):
        contestants.append(_plain)
    steps = [
        make(*layout_of(BLOCKS[block], text, layers), compiled) for make in contestants for layers in DEPTHS
    ]
    ours, *plain = per_layer_ms(steps, rounds)
    return Times(ours, plain[0] if plain else None)


def per_layer_ms(steps: list[Step], rounds: int) -> list[float]:
    """Milliseconds of the training thread for a layer and microbatch, of each contestant.

    Args:
        steps: of models of two depths, contestant after contestant; all take turns.
    """
    tokens = np.random.RandomState(0)
    taken: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + WARM_UP):
        for own, step in zip(taken, steps, strict=True):
            batch = tokens.randint(0, DENSE.vocab, (MICRO_BATCHES, DENSE.seq + 1)).astype(np.int64)
            started = time.thread_time()
            step(batch)
            if number >= WARM_UP:
                own.append(time.thread_time() - started)
    # The quickest: what else runs on the machine empties caches, and only adds.
    least = [min(own) for own in taken]
    layers = (DEPTHS[1] - DEPTHS[0]) * MICRO_BATCHES
    pairs = zip(least[::2], least[1::2], strict=True)
    return [1000 * (deep - shallow) / layers for shallow, deep in pairs]


def _trainer(spec: ModelSpec, layout: Layout, compiled: bool) -> Step:
    """The passes of a training step of the runtime."""
    import torch

    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer

    options = TrainingOptions(train_iters=1, compile=compiled, no_compile=not compiled)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))

    def step(batch: np.ndarray) -> None:
        trainer.executor.train(*trainer._inputs(batch))
        trainer.optimizer.drop_gradients()

    return step


def _plain(spec: ModelSpec, layout: Layout, compiled: bool) -> Step:
    """Milliseconds of the host for the passes in plain PyTorch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from runtime.model.transformer import Transformer

    shards, splits = layout.zero_stage > 0 and layout.data_parallel > 1, layout.tensor_parallel > 1
    torch.manual_seed(0)
    model: Any = Transformer(spec, spec.padded_vocab(1))
    # Grouped products of experts know no autocast.
    casts = not shards and not spec.experts
    if spec.experts and not shards:
        model.bfloat16()
    model.place(torch.arange(spec.seq))
    if splits:
        _split_plainly(model, layout)
    if compiled and not (shards or splits):
        model.compile()
    elif compiled:
        for block in model.blocks:
            block.compile()
    if shards:
        _shard(model, layout)
    elif layout.data_parallel > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())

    def step(batch: np.ndarray) -> None:
        micro_batches = torch.split(torch.from_numpy(batch), 1)
        for number, micro in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            if shards and layout.zero_stage < 3:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            elif layout.data_parallel > 1 and not shards:
                model.require_backward_grad_sync = last
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                logits = model(micro[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), micro[:, 1:].flatten())
            torch.autograd.backward(loss / len(micro_batches))
        for parameter in parameters:
            parameter.grad = None

    return step


def _shard(model: Any, layout: Layout) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": layout.zero_stage == 3,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _split_plainly(model: Any, layout: Layout) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import Replicate, Shard

    mesh = init_device_mesh("cpu", (layout.tensor_parallel,))
    split = Shard(1) if layout.sequence_parallel else Replicate()
    inputs = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attention": inputs,
            "mlp": inputs,
            "attention.output": RowwiseParallel(output_layouts=split),
            "mlp.down": RowwiseParallel(output_layouts=split),
        }
        plan |= dict.fromkeys(
            ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate"), ColwiseParallel()
        )
        if layout.sequence_parallel:
            plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)
    plan = {"embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=split)}
    head = ColwiseParallel(input_layouts=split, output_layouts=Replicate(), use_local_output=True)
    plan |= {"norm": SequenceParallel()} if layout.sequence_parallel else {}
    parallelize_module(model, mesh, plan | {"head": head})


app = typer.Typer(add_completion=False)


@app.command()
def host_time(
    only: Annotated[str, typer.Option(help="Run the rows whose block or layout has this in it.")] = "",
    form: Annotated[str, typer.Option(help="compiled, eager, or both.")] = "both",
    rounds: Annotated[int, typer.Option(help="Steps of each model that are timed.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the host's time for a layer and microbatch."""
    forms = {"compiled": [True], "eager": [False], "both": [True, False]}.get(form)
    if forms is None:
        raise InputError(f"--form {form}: it is compiled, eager or both")
    if rounds < 1:
        raise InputError(f"--rounds {rounds}: at least 1")
    if True in forms and which("g++") is None:
        raise InputError("layers compile for the CPU with g++, which is not installed; say --form eager")
    wanted = [(block, text) for block in BLOCKS for text in LAYOUTS if only in f"{block} {text}"]
    if not wanted:
        raise InputError(f"--only {only}: no row has it; blocks are {', '.join(BLOCKS)}, layouts {LAYOUTS}")
    found: list[Row] = []
    for block, text in wanted:
        for compiled in forms:
            found.append(row(block, text, compiled, rounds))
            if not as_json:
                print(line(found[-1]), flush=True)
    if as_json:
        json.dump({"rows": [one._asdict() for one in found]}, sys.stdout, indent=2)
        print()


def line(one: Row) -> str:
    """A row as text."""
    name = f"{one.block} {one.layout} {'compiled' if one.compiled else 'eager'}"
    plain = "" if one.plain_ms is None else f", plain PyTorch {one.plain_ms:.3f}, {one.ratio:.2f} x"
    return f"{name}: {one.host_ms:.3f} ms a layer and microbatch{plain}"


if __name__ == "__main__":
    run(app, "benchmarks.host_time")
