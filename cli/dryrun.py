"""`planner dryrun`: the memory of a plan's training step, traced without GPUs."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from cli.flag_notes import unused_flag_notes
from cli.proof import traces_of
from cli.status import Status
from cli.tables import console, table
from cli.training_flags import training_flags
from costmodels.dataclass import dataclass
from costmodels.spec.record import GIB
from planner import advice
from planner.api import search
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.flags import flag, flag_groups
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions, check_alone
from planner.options.search import idle_links, search_keywords
from planner.plan import Plan
from runtime.dryrun.fit import TOTAL, estimated_bytes, fits, needed_bytes
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace
from runtime.dryrun.ranks import early_tracer
from runtime.dryrun.requirements import check_installed, ranks_to_trace
from runtime.settings.checks import check_plan, check_training
from runtime.settings.idle_flags import idle_flag_notes
from runtime.settings.job_rules import job_rules, reachable_batch
from runtime.settings.training_options import TrainingOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.space.rule import Rule

MIB = 2**20

SHORT_HEADINGS = {
    "parameters": "params",
    "gradients": "grads",
    "activations": "activ.",
    "communication": "comm.",
    "temporaries": "temp.",
}
"""Short column headings of parts of memory, by their names."""


@dataclass(frozen=True)
class DryRunOptions:
    """The ranks to trace and the format of the result."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "Trace"}

    plan: str | None = flag(None, "Plan file to trace instead of planning.", metavar="FILE")
    stage: int | None = flag(None, "Trace this pipeline rank only.")
    rank: int | None = flag(None, "Trace this rank only.")
    json: bool = flag(False, "Print one JSON object instead of tables.")


@flag_groups(
    unused=training_flags(but=DryRunOptions, trains=True),
    model=ModelOptions,
    cluster=ClusterOptions,
    batch=BatchOptions,
    parallel=ParallelOptions,
    training=TrainingOptions,
    options=DryRunOptions,
)
def dryrun(
    model: ModelOptions,
    cluster: ClusterOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    training: TrainingOptions,
    options: DryRunOptions,
    unused: object,
) -> None:
    """Run the training step of a plan without GPUs or memory, and show the memory of every stage.

    Traces the best plan of the same flags as planner suggest, or the plan of a file.
    """
    training.check()
    with early_tracer() if options.plan is None else nullcontext() as early:
        if options.plan is None:
            plan = _planned(
                model, cluster, reachable_batch(batch, training), parallel, job_rules(training, unused)
            )
        else:
            check_alone(model, batch, parallel, cluster)
            plan = Plan.load(options.plan)
        check_plan(plan, plan.layout.world_size)
        check_training(plan, training, unused)
        idle = idle_flag_notes(training, spec=plan.model, layout=plan.layout)
        for line in (*idle, *unused_flag_notes(unused, "a dry run")):
            print(f"planner: note: {line}", file=sys.stderr)
        ranks = ranks_to_trace(plan.layout, options.stage, options.rank)
        check_installed(plan.layout)
        with Status() as status:
            traces = traces_of(plan, training, ranks, status, early)
    if options.json:
        print(json.dumps(as_json(plan, traces), indent=2), flush=True)
    else:
        _print(plan, traces)


def _planned(
    model: ModelOptions,
    cluster: ClusterOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    rules: Sequence[Rule],
) -> Plan:
    """The best plan of the flags."""
    spec = model.spec()
    asked = search_keywords(spec, cluster, batch, parallel, rules)
    result = search(spec, world_size=cluster.required_world_size(), **asked)
    if not result.feasible:
        raise advice.no_layout_fits(result)
    idle = idle_links(cluster, result.problem.cluster)
    for note in (*model.notes(), *cluster.notes(), *parallel.notes(), *idle):
        print(f"planner: assumed: {note}", file=sys.stderr)
    return result.plans(1)[0]


def as_json(plan: Plan, traces: Sequence[MemoryTrace]) -> dict[str, Any]:
    """The answer of `planner dryrun --json`; sizes in bytes."""
    return {
        "model": plan.model.name,
        "layout": plan.layout.model_dump(mode="json"),
        "device": plan.cluster.device.name,
        "compiled": traces[0].compiled,
        "ranks": [
            trace.as_json()
            | {"needed_bytes": needed_bytes(plan, trace), "fits": fits(plan, trace)}
            | {"estimate": estimated_bytes(plan, trace)}
            for trace in traces
        ],
    }


def _print(plan: Plan, traces: Sequence[MemoryTrace]) -> None:
    screen = console()
    layers = "compiled" if traces[0].compiled else "eager"
    screen.print(f"[bold]{plan.model.name}[/bold]: {plan.layout.describe()}")
    device = plan.cluster.device.name
    screen.print(f"{layers} layers on {device}, with {plan.cluster.memory_bytes / GIB:.1f} GiB a device")
    largest = max(trace.peak.total for trace in traces)
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    peaks = [
        [
            str(trace.pipeline_rank),
            str(trace.rank),
            f"{trace.peak.total / unit:.2f}",
            f"{estimated_bytes(plan, trace)[TOTAL] / unit:.2f}",
            trace.peak.label,
        ]
        for trace in traces
    ]
    screen.print(
        table(["pp", "rank", f"peak ({name})", f"planned ({name})", "moment"], peaks, left=("moment",))
    )
    screen.print(f"\ntensors at the peak ({name})")
    rows = [
        [str(trace.pipeline_rank), *(f"{trace.peak.allocated[key] / unit:.2f}" for key in CATEGORIES)]
        for trace in traces
    ]
    screen.print(table(["pp", *(SHORT_HEADINGS.get(key, key) for key in CATEGORIES)], rows))
    kinds = list(dict.fromkeys(kind for trace in traces for kind in trace.peak.layers))
    if kinds:
        by_kind = [
            [str(trace.pipeline_rank), *(f"{trace.peak.layers.get(kind, 0) / unit:.2f}" for kind in kinds)]
            for trace in traces
        ]
        screen.print(f"\nactivations ({name}) by the kind of layer that keeps them")
        screen.print(table(["pp", *kinds], by_kind))
    for trace in traces:
        if not fits(plan, trace):
            screen.print(
                f"\npipeline rank {trace.pipeline_rank} does not fit: its tensors, the driver's context and "
                f"communicators take {needed_bytes(plan, trace) / unit:.2f} {name} of "
                f"{plan.cluster.memory_bytes / unit:.2f}"
            )
    if any(trace.host_bytes for trace in traces) and (
        plan.layout.offload_activations or plan.layout.offload_optimizer
    ):
        host = max(trace.host_bytes for trace in traces)
        screen.print(f"\nhost memory: {host / unit:.2f} {name} a rank")
