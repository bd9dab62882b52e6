"""Host operations for a layer and microbatch, as PyTorch's profiler sees them: `python -m
benchmarks.host_trace`.

Models of two depths train on one CPU rank, with tiny tensors. The additional operations of the deeper model
are those of its additional layers, forward and backward. A kernel is an operator of PyTorch that computes and
calls no other computing operator. Every function that the compiler made counts as one kernel. `--against`
shows the figures of another commit's checkout beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.options.flags import run
from tests.support.layouts import parse_layout
from tests.support.worker_pool import WorkerPool

# Another checkout runs this very file with its own packages: of these it takes what has long been there.
DENSE = ModelSpec(
    name="dense",
    layers=1,
    hidden=32,
    heads=2,
    ffn=64,
    vocab=64,
    seq=8,
    gated=True,
    activation="silu",
    norm="rmsnorm",
    position="rope",
    tied=False,
    linear_bias=False,
)

BLOCKS = {
    "dense": DENSE,
    "experts": DENSE.model_copy(update={"name": "experts", "experts": 4, "top_k": 2, "expert_ffn": 32}),
}
"""Models whose layers are traced, and timed by `benchmarks.host_time`."""

DEPTHS, MICRO_BATCHES = (2, 8), 4
"""Layers of the two models, and the batch of a step."""

WARM_UP = 3
"""Number of steps before the trace, which compile layers and make the optimizer's state."""

Calls = dict[str, float]
"""Calls of a layer and microbatch, by name."""

KERNELS, OPERATORS, COMPILED = "kernels of PyTorch", "other operators of PyTorch", "compiled functions"
GUARDS, NODES = "guards of compiled layers", "nodes of autograd"

BEGINNINGS = {
    COMPILED: ("## Call CompiledFxGraph",),
    GUARDS: ("TorchDynamo Cache Lookup",),
    NODES: ("autograd::engine::evaluate_function",),
}
"""Prefixes of the profiler's names for events that are no operators."""

VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "as_strided", "detach", "expand", "lift_fresh", "reshape", "resolve_conj", "resolve_neg"),
        *("select", "slice", "split", "t", "to", "transpose", "unbind", "unsqueeze", "view", "view_as"),
        *("_reshape_alias", "_unsafe_view", "empty", "empty_like", "empty_strided"),
    )
)
"""Operators that compute nothing."""

SUMMARY = (COMPILED, KERNELS, OPERATORS, GUARDS, NODES)


def calls(block: str, text: str, compiled: bool) -> Calls:
    """Counts of the profiler for a layer and microbatch; runs on a rank of its own."""
    import torch

    torch._dynamo.config.cache_size_limit = 64
    shallow, deep = (_counted(BLOCKS[block], text, layers, compiled) for layers in DEPTHS)
    layers = (DEPTHS[1] - DEPTHS[0]) * MICRO_BATCHES
    return {name: (deep[name] - shallow[name]) / layers for name in deep if deep[name] != shallow[name]}


def _counted(block: ModelSpec, text: str, layers: int, compiled: bool) -> Counter[str]:
    """Counts of the events in the passes of one step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer

    spec = block.model_copy(update={"layers": layers})
    layout: Layout = parse_layout(f"{text},precision=bf16,mbs=1,gbs={MICRO_BATCHES}", spec)
    options = TrainingOptions(train_iters=1, compile=compiled, no_compile=not compiled)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))
    batch = np.random.RandomState(0).randint(0, spec.vocab, (MICRO_BATCHES, spec.seq + 1)).astype(np.int64)
    for _ in range(WARM_UP):
        trainer.train_step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.executor.train(*trainer._inputs(batch))
    counts: Counter[str] = Counter()
    for event in seen.events() or ():
        _count(counts, event)
    return counts


def _count(counts: Counter[str], event: Any) -> None:
    name = event.name
    if name.startswith("aten::"):
        computes = name not in VIEWS and all(child.name in VIEWS for child in event.cpu_children)
        counts[KERNELS if computes else OPERATORS] += 1
        counts[name] += computes
    for kind, beginnings in BEGINNINGS.items():
        counts[kind] += name.startswith(beginnings)


app = typer.Typer(add_completion=False)


@app.command()
def host_trace(
    block: Annotated[list[str], typer.Option(help="dense or experts; both unless given.")] = list(BLOCKS),  # noqa: B006
    layout: Annotated[str, typer.Option(help="Of one rank.")] = "dp=1",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Whether layers are compiled.")
    ] = True,
    other: Annotated[Path | None, typer.Option("--against", help="A checkout of another commit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count kernels and calls of the host for a layer and microbatch."""
    for name in block:
        if name not in BLOCKS:
            raise InputError(f"--block {name}: it is one of {', '.join(BLOCKS)}")
    if other is not None and not (other / "runtime" / "train" / "trainer.py").is_file():
        raise InputError(f"--against {other}: no checkout with runtime/train/trainer.py")
    pool = WorkerPool(1)
    here: dict[str, Calls] = {name: pool.run(calls, 1, name, layout, compiled)[0] for name in block}
    if as_json:
        json.dump(here, sys.stdout, indent=2)
        print()
        return
    there: dict[str, Calls] = {}
    if other is not None:
        words = [f"--block={name}" for name in block]
        words += [f"--layout={layout}", "--compile" if compiled else "--no-compile"]
        there = _counted_in(other.resolve(), words)
    for name in block:
        _show(name, here[name], there.get(name))


def _show(block: str, here: Calls, there: Calls | None) -> None:
    """Print the calls of a block, those of the other checkout beside it."""
    columns = [here] if there is None else [here, there]
    heads = ["here", "there"][: len(columns)]
    print(f"{block + ', a layer and microbatch':<44}" + "".join(f"{head:>8}" for head in heads))
    names = {name for column in columns for name in column}
    single = sorted(names - set(SUMMARY), key=lambda name: (-sum(one.get(name, 0) for one in columns), name))
    for name in [*SUMMARY, *single]:
        if any(abs(column.get(name, 0.0)) >= 0.005 for column in columns):
            print(f"{name:<44}" + "".join(f"{column.get(name, 0.0):8.2f}" for column in columns))


def _counted_in(tree: Path, words: list[str]) -> dict[str, Calls]:
    """The calls in another checkout, which may lack this command."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(__file__, Path(scratch) / "traced_elsewhere.py")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), scratch))}
        command = [sys.executable, "-m", "traced_elsewhere", "--json", *words]
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:
        raise InputError(f"--against {tree}: it could not be traced; what it said stands above")
    found: dict[str, Calls] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    run(app, "benchmarks.host_trace")
