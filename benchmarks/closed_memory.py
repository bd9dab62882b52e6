"""The closed form of memory, by which the search ranks all layouts, against played tapes.

python -m benchmarks.closed_memory [--rows N] [--seed S] [--record] [--json]

Legal layouts are drawn from the searches of some jobs, whether they fit or not. Compared are bytes of tensors
on the fullest pipeline rank. Layouts whose units have no tape are left out, and counted, or recorded first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from costmodels.pricing import price
from costmodels.ranks.reductions import parts_total
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.table import Floats
from costmodels.tapes import player
from planner import search
from planner.options.flags import run
from tests.support.played_memory import UnknownError, record

Job = tuple[str, int, str, int]
"""Model, devices, kind of device, largest batch."""

JOBS: tuple[Job, ...] = (
    ("gpt2-xl", 8, "a100-80g", 64),
    ("llama2-7b", 8, "a100-80g", 64),
    ("llama3-8b", 64, "h100", 128),
    ("llama2-70b", 64, "a100-80g", 128),
    ("llama3-70b", 256, "h100", 512),
    ("gpt3-175b", 512, "h100", 1024),
    ("qwen3-8b", 32, "h100", 128),
    ("mixtral-8x7b", 64, "h100", 128),
    ("deepseek-v3", 1024, "h100", 2048),
)

LOW = 0.02
"""An estimate that is lower by more than this share lets layouts in that do not fit."""


class Compared(NamedTuple):
    """One layout."""

    layout: Layout
    experts: bool
    error: float
    """Of the closed form, as a share of what is played."""


def kinds_of(one: Compared) -> Iterator[str]:
    """The kinds that a layout is of."""
    layout = one.layout
    yield "all"
    yield "experts" if one.experts else "dense"
    yield f"recompute {layout.recompute}"
    yield f"zero {layout.zero_stage}" if layout.data_parallel * layout.context_parallel > 1 else "one replica"
    yield "no pipeline" if layout.pipeline_parallel == 1 else f"schedule {layout.schedule}"
    if layout.tensor_parallel > 1:
        yield "sequence parallel" if layout.sequence_parallel else "tensor parallel"
    if layout.context_parallel > 1:
        yield f"context {layout.context_parallel_form}"
    for name in ("activations", "optimizer"):
        if getattr(layout, f"offload_{name}"):
            yield f"offload {name}"


def compared(job: Job, rows: int, rng: np.random.Generator, records: bool) -> tuple[list[Compared], int]:
    """Some layouts of a job, and how many others have no tapes; `records` makes those that can be made."""
    model, world_size, device, batch = job
    result = search(model, world_size=world_size, device=device, max_global_batch_size=batch)
    problem = result.problem
    chosen = rng.permutation(len(result.table))[:rows]
    table = result.table.take(np.sort(chosen))
    where = problem.model, problem.cluster, problem.engine
    engine = problem.engine.for_device(problem.cluster.device)
    parts = price(*where, table).memory
    closed: Floats = parts_total({name: parts[name][:, None] for name in player.CATEGORIES})[:, 0]
    found, unknown = [], 0
    for row, estimate in enumerate(closed.tolist()):
        layout = table.layout(row)
        compiled = layout.schedule not in SPLIT_BACKWARD
        if records:
            with suppress(UnknownError):
                record(problem.model, layout, compiled)
        if not player.plays(problem.model, layout, compiled):
            unknown += 1
            continue
        totals, _ = player.rank_peaks(problem.model, [layout], compiled)
        exact = totals.max() + engine.allocator.workspace_bytes
        found.append(Compared(layout, problem.model.experts > 0, estimate / exact - 1))
    return found, unknown


def by_kind(every: Sequence[Compared]) -> list[dict[str, Any]]:
    """Errors of each kind, that of all first."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for one in every:
        for kind in kinds_of(one):
            errors[kind].append(one.error)
    return [
        {
            "kind": kind,
            "layouts": len(some),
            "median": float(np.median(some)),
            "mean_size": float(np.mean(np.abs(some))),
            "least": min(some),
            "most": max(some),
            "too_low": float(np.mean(np.array(some) < -LOW)),
        }
        for kind, some in sorted(errors.items(), key=lambda item: (item[0] != "all", item[0]))
    ]


def closed_memory(
    rows: Annotated[int, typer.Option(min=1, help="Layouts of each job.")] = 100,
    seed: Annotated[int, typer.Option(help="Of their random choice.")] = 0,
    records: Annotated[bool, typer.Option("--record", help="Record units that have no tape.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the errors of the closed form by kind of layout."""
    rng = np.random.default_rng(seed)
    every: list[Compared] = []
    unknown = 0
    for job in JOBS:
        found, others = compared(job, rows, rng, records)
        every += found
        unknown += others
    table = by_kind(every)
    if as_json:
        print(json.dumps({"kinds": table, "unknown": unknown}, indent=2))
        return
    print(f"{len(every)} layouts of {len(JOBS)} jobs; {unknown} others have units without a tape")
    print(f"{'kind':26} {'layouts':>7} {'median':>8} {'mean size':>9} {'least':>8} {'most':>8} {'< -2 %':>7}")
    for one in table:
        print(
            f"{one['kind']:26} {one['layouts']:7} {one['median']:+8.1%} {one['mean_size']:9.1%} "
            f"{one['least']:+8.1%} {one['most']:+8.1%} {one['too_low']:7.0%}"
        )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(closed_memory)
    run(app, "benchmarks.closed_memory")
