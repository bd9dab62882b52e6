"""`planner suggest`: rank the layouts of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cli.notes import HEAD_ROOM, needs_head_room, whole_optimizer
from costmodels.errors import InputError
from costmodels.topology import describe
from planner import advice
from planner.flags import arguments, flag, ignored, takes
from planner.inputs import DEFAULT_ENGINE
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions
from planner.pins import WherePossible
from planner.plan import Plan
from planner.ranking import Problem, SearchResult
from planner.search import search
from runtime.options import DataOptions, OutputOptions, TrainingOptions
from runtime.preflight import PRECISIONS, check_model


@dataclass(frozen=True)
class Output:
    """What is printed and written."""

    top: int = flag(10, "Plans to show.")
    json: bool = flag(False, "Print one JSON object instead of tables.")
    save: str | None = flag(None, "Write the best plan to this file.", metavar="FILE")
    timeline: str | None = flag(
        None, "Write the best plan's simulated pipeline for chrome://tracing or Perfetto.", metavar="FILE"
    )


@dataclass(frozen=True)
class Waiting:
    """What only a job that runs needs."""

    distributed_timeout_minutes: float | None = flag(None, "Minutes after which a collective is an error.")


@takes(
    unused=ignored(TrainingOptions, DataOptions, OutputOptions, Waiting, but=Output),
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
    unused: object,
) -> None:
    """Rank the parallel layouts of a training job by tokens per second.

    The other flags of a training command are accepted too, so that one can be pasted; none is used.
    """
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
        **cluster.network(),
    )
    assumed = [*model.notes(), *cluster.notes()]
    plans = result.plans(output.top) if result.feasible else result.closest(output.top)
    notes = [
        *_joined(result.problem, cluster),
        *_limits(result.problem),
        *_of_plans(plans, parallel),
        *_not_used(unused, parallel),
    ]
    if output.json:
        for line in [*(f"assumed: {note}" for note in assumed), *(f"note: {note}" for note in notes)]:
            print(f"planner: {line}", file=sys.stderr)
        print(json.dumps(as_json(result, plans, assumed, notes), indent=2))
    else:
        from cli.report import print_report  # Rich is loaded only to draw.

        print_report(result, plans, assumed, notes)
    if not result.feasible:
        raise advice.no_layout_fits(result)
    if output.save is not None:
        plans[0].save(output.save)
        print(f"planner: saved {output.save}", file=sys.stderr)
    if output.timeline is not None:
        plans[0].timeline().save(output.timeline)
        print(f"planner: saved {output.timeline}", file=sys.stderr)


def _joined(problem: Problem, cluster: ClusterOptions) -> Iterator[str]:
    """The network as it was understood, where flags say something of it."""
    if cluster.network():
        yield f"network: {describe(problem.cluster)}"


def _limits(problem: Problem) -> Iterator[str]:
    """What the plans leave out, and why this package's runtime could not train them."""
    if problem.engine.name != DEFAULT_ENGINE:
        return
    try:
        check_model(problem.model)
    except InputError as error:
        yield str(error)
    if problem.precision not in PRECISIONS:
        yield (
            f"precision {problem.precision}: the runtime does not train in it; it computes in "
            f"{' or '.join(PRECISIONS)}"
        )


def _of_plans(plans: list[Plan], parallel: ParallelOptions) -> Iterator[str]:
    """What the figures of plans rest on, and what would lower them."""
    if any(map(needs_head_room, plans)):
        yield HEAD_ROOM
    yield from whole_optimizer(plans[0], parallel)


def _not_used(unused: object, parallel: ParallelOptions) -> Iterator[str]:
    """Flags of other commands, and those that say what only this package's runtime does anyway."""
    given = [word for word in arguments(unused) if word.startswith("--")]
    if parallel.engine != DEFAULT_ENGINE:
        given += parallel.given_accepted()
    if given:
        yield f"not used for planning: {', '.join(dict.fromkeys(given))}"


def as_json(result: SearchResult, plans: list[Plan], assumed: list[str], notes: list[str]) -> dict[str, Any]:
    """The answer of `planner suggest --json`."""
    problem = result.problem
    shared = {"version", "model", "cluster", "engine", "considered", "legal", "feasible", "rejected"}
    return {
        "model": problem.model.model_dump(mode="json") | {"parameters": problem.model.parameters},
        "cluster": problem.cluster.model_dump(mode="json"),
        "engine": problem.engine.name,
        "precision": problem.precision,
        "batch": {"size": problem.batch.size, "maximum": problem.batch.maximum},
        "pins": {
            name: str(value) if isinstance(value, WherePossible) else value
            for name, value in problem.pins.items()
        },
        "assumed": assumed,
        "notes": notes,
        "considered": result.considered,
        "legal": result.legal,
        "feasible": result.feasible,
        "rejected": result.rejected,
        "elapsed_s": result.elapsed_s,
        "plans": [plan.model_dump(mode="json", exclude=shared) for plan in plans],
    }
