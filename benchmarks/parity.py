"""Comparison of training under layouts with training on one rank: `python -m benchmarks.parity --layout
tp=2,pp=2`.

Losses, gradient norms and final weights are compared, over steps that reveal errors: the tokens can be
learned, the learning rate is large, weights decay, and gradients are clipped.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from costmodels.errors import InputError
from planner.options.flags import run
from runtime.settings.checks import check_job
from tests.support.layouts import GLOBAL_BATCH_SIZE, deep_enough, parse_layout
from tests.support.models import MODELS
from tests.support.ranks.parity import Training, difference, trained
from tests.support.worker_pool import WorkerPool

if TYPE_CHECKING:
    pass


app = typer.Typer(add_completion=False)


@app.command()
def parity(
    layout: Annotated[list[str], typer.Option(help="Layout such as tp=2,pp=2 (repeatable).")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "gpt2",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers of the layouts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train each layout and one rank on the same tokens; compare losses, gradient norms and weights."""
    if model not in MODELS:
        raise InputError(f"--model {model}: choose one of {', '.join(MODELS)}")
    if steps < 1:
        raise InputError(f"--steps {steps}: must be at least 1")
    spec = MODELS[model]
    jobs = {}
    for text in layout:
        deep = deep_enough(text, spec)
        jobs[text] = deep, parse_layout(text, deep)
        check_job(*jobs[text], jobs[text][1].world_size)
    pool = WorkerPool(max(one.world_size for _, one in jobs.values()))

    @cache
    def reference(layers: int, batch: int) -> Training:
        same = spec.model_copy(update={"layers": layers})
        alone: Training = pool.run(trained, 1, same, parse_layout(f"gbs={batch}", same), steps)[0]
        return alone

    results = {}
    for text, (deep, one) in jobs.items():
        by_rank = pool.run(trained, one.world_size, deep, one, steps, compiled)
        batch = one.global_batch_size
        alone = reference(deep.layers, batch)
        found = difference(by_rank, alone)
        results[text] = {
            "max_relative_difference": found.largest,
            "max_relative_differences": found._asdict(),
            "losses": by_rank[0].losses,
            "gradient_norms": by_rank[0].norms,
            "reference": alone.losses,
            "reference_gradient_norms": alone.norms,
        }
        if not as_json:
            of_each = (
                f"losses {found.losses:.1e}, gradient norms {found.norms:.1e}, weights {found.weights:.1e}"
            )
            print(
                f"{text}: largest relative difference {found.largest:.2e} over {steps} steps ({of_each})",
                flush=True,
            )
    if as_json:
        usual = reference(spec.layers, GLOBAL_BATCH_SIZE).losses
        json.dump({"model": model, "reference": usual, "layouts": results}, sys.stdout)
        print()


if __name__ == "__main__":
    run(app, "benchmarks.parity")
