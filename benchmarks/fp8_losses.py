"""Losses in fp8 beside those in bf16, on a CPU: `python -m benchmarks.fp8_losses`.

One small model is trained on the same tokens, which can be learnt, in each number format, and in fp8 under
several layouts. While losses fall fast, what is rounded otherwise moves them by a few steps.
"""

from __future__ import annotations

from typing import Annotated

import typer

from planner.options.flags import run
from tests.support.layouts import parse_layout
from tests.support.models import llama
from tests.support.ranks.parity import Training, trained
from tests.support.worker_pool import WorkerPool

SPEC = llama("curve", layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=256, seq=128)

BATCH = 8

JOBS = {
    "bf16": "precision=bf16",
    "fp8": "precision=fp8",
    "fp8 tp 2": "precision=fp8,tp=2,sp=1",
    "fp8 pp 2": "precision=fp8,pp=2",
    "fp8 dp 2": "precision=fp8,dp=2",
    "fp8 ZeRO 3": "precision=fp8,dp=2,zero=3",
    "rowwise": "precision=fp8,fp8_recipe=rowwise",
}
"""Layouts by the names of columns; the others are compared with the first one."""

EVERY = 10
"""Steps from one row to the next."""

app = typer.Typer(add_completion=False)


@app.command()
def fp8_losses(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
) -> None:
    """Train in each format; print losses and their differences from those in bf16."""
    found: dict[str, Training] = {}
    pool = WorkerPool(2)
    for name, text in JOBS.items():
        layout = parse_layout(f"gbs={BATCH},mbs=2,{text}", SPEC)
        found[name] = pool.run(trained, layout.world_size, SPEC, layout, steps)[0]
    print(f"{'step':<22}" + "".join(f"{name:>12}" for name in JOBS))
    for step in [*range(0, steps, EVERY), steps - 1]:
        print(f"{step + 1:<22}" + "".join(f"{one.losses[step]:>12.4f}" for one in found.values()))
    expected = found["bf16"].losses
    apart = {
        name: [abs(loss / other - 1) for loss, other in zip(one.losses, expected, strict=True)]
        for name, one in found.items()
    }
    largest = "".join(f"{100 * max(each):>11.2f}%" for each in apart.values())
    mean = "".join(f"{100 * sum(each) / len(each):>11.2f}%" for each in apart.values())
    later = "".join(
        f"{100 * sum(each[steps // 2 :]) / len(each[steps // 2 :]):>11.2f}%" for each in apart.values()
    )
    print(f"{'largest off bf16':<22}{largest}\n{'mean off bf16':<22}{mean}\n{'mean, second half':<22}{later}")


if __name__ == "__main__":
    run(app, "benchmarks.fp8_losses")
