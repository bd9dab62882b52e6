"""`planner suggest`: rank the layouts of a job."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from costmodels.errors import InputError
from planner import advice
from planner.flags import flag, takes
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions
from planner.plan import Plan
from planner.ranking import SearchResult
from planner.search import search


@dataclass(frozen=True)
class Output:
    """What is printed and written."""

    top: int = flag(10, "Plans to show.")
    json: bool = flag(False, "Print one JSON object instead of tables.")
    save: str | None = flag(None, "Write the best plan to this file.", metavar="FILE")


@takes(
    model=ModelOptions,
    cluster=ClusterOptions,
    batch=BatchOptions,
    parallel=ParallelOptions,
    output=Output,
)
def suggest(
    model: ModelOptions,
    cluster: ClusterOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    output: Output,
) -> None:
    """Rank the parallel layouts of a training job by tokens per second."""
    if output.top < 1:
        raise InputError(f"--top {output.top}: expected a whole number of at least 1")
    spec = model.spec()
    result = search(
        spec,
        world_size=cluster.required_world_size(),
        local_world_size=cluster.local_world_size,
        device=cluster.device,
        global_batch_size=batch.global_batch_size,
        max_global_batch_size=batch.max_global_batch_size,
        engine=parallel.engine,
        pin=parallel.pins(spec),
    )
    assumed = [*model.notes(), *cluster.notes()]
    plans = result.plans(output.top) if result.feasible else result.closest(output.top)
    if output.json:
        for note in assumed:
            print(f"planner: assumed: {note}", file=sys.stderr)
        print(json.dumps(as_json(result, plans, assumed), indent=2))
    else:
        from cli.report import print_report  # Rich is loaded only to draw.

        print_report(result, plans, assumed)
    if not result.feasible:
        raise advice.no_layout_fits(result)
    if output.save is not None:
        plans[0].save(output.save)
        print(f"planner: saved {output.save}", file=sys.stderr)


def as_json(result: SearchResult, plans: list[Plan], assumed: list[str]) -> dict[str, Any]:
    """The answer of `planner suggest --json`."""
    problem = result.problem
    shared = {"version", "model", "cluster", "engine", "considered", "legal", "feasible", "rejected"}
    return {
        "model": problem.model.model_dump(mode="json") | {"parameters": problem.model.parameters},
        "cluster": problem.cluster.model_dump(mode="json"),
        "engine": problem.engine.name,
        "precision": problem.precision,
        "batch": {"size": problem.batch.size, "maximum": problem.batch.maximum},
        "pins": problem.pins,
        "assumed": assumed,
        "considered": result.considered,
        "legal": result.legal,
        "feasible": result.feasible,
        "rejected": result.rejected,
        "elapsed_s": result.elapsed_s,
        "plans": [plan.model_dump(mode="json", exclude=shared) for plan in plans],
    }
