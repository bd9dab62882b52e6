"""Dry runs of few layers against those of all layers, on random models and layouts.

python -m benchmarks.few_layers [--examples N] [--seed S] [--json]

Each example is a model of 10 to 22 layers, a legal layout of up to 64 ranks, one of its pipeline ranks, and
layers that are compiled or not. The models are GPT-2 or Llama, perhaps with experts or latent attention,
windows, sinks, Gated DeltaNet, scores with caps or MTP modules. Only examples for which a dry run leaves
layers out are used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from costmodels import Layout, ModelSpec
from costmodels.pytorch import full_version
from planner.options.flags import run
from runtime.dryrun.few_layers import few_layers
from runtime.dryrun.run import trace
from tests.support import drawn_layouts
from tests.support.drawn_layouts import Example

DEPTHS = (10, 13, 16, 22)
"""Layers of the models."""

BLOCKS = (1, 2, 5, 7, 9)
"""Numbers of recomputed layers in examples with partial recomputation."""


def drawn(seed: int) -> Iterator[Example]:
    """Endless random examples."""
    chosen = random.Random(seed)
    while True:
        example = drawn_layouts.draw(chosen.choice, depths=DEPTHS, blocks=BLOCKS)
        if example is not None and few_layers(example.model, example.layout, example.rank) is not None:
            yield example


def compared(model: ModelSpec, layout: Layout, rank: int, compiled: bool) -> dict[str, Any]:
    """The bytes of an example, traced with few layers and with all, and the number of operations of each
    trace."""
    few, all_ = (
        trace(model, layout, pipeline_rank=rank, compiled=compiled, whole=whole) for whole in (False, True)
    )
    return {
        "few": few.peak.total,
        "all": all_.peak.total,
        "host": (few.host_bytes, all_.host_bytes),
        "same_moment": few.peak == all_.peak,
        "operations": (few.operations, all_.operations),
    }


def few_layers_against_all(
    examples: Annotated[int, typer.Option(min=1, help="How many are compared.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare peaks of few layers with those of all."""
    found = []
    for example in islice(drawn(seed), examples):
        one = compared(*example) | {"example": example.describe()}
        found.append(one)
        if not as_json and one["few"] != one["all"]:
            print(f"{one['few'] - one['all']:+d} bytes of {one['all']}: {one['example']}", flush=True)
    if as_json:
        print(json.dumps({"torch": full_version(), "seed": seed, "examples": found}, indent=2))
        return
    same = sum(one["few"] == one["all"] for one in found)
    worst = max(abs(one["few"] / one["all"] - 1) for one in found)
    print(f"PyTorch {full_version()}, seed {seed}: {same} of {len(found)} peaks are the same to the byte")
    print(f"at most {worst:.3%} off; {sum(one['same_moment'] for one in found)} at the same moment")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(few_layers_against_all)
    run(app, "benchmarks.few_layers")
