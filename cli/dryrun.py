"""`planner dryrun`: the memory of a plan's training step, traced without GPUs."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from cli.interrupts import leaving_at_ctrl_c
from cli.notes import not_used
from cli.pasted import pasted
from cli.status import Status
from cli.tables import console, table
from costmodels.catalogue.host import available_cores
from costmodels.errors import InputError
from costmodels.estimate import StageMemory
from costmodels.words import GIB
from planner import advice
from planner.asked import idle_links, search_arguments
from planner.flags import flag, takes
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions, check_alone
from planner.plan import Plan
from planner.search import search
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace
from runtime.settings.job_rules import job_rules, reachable
from runtime.settings.no_effect import without_effect
from runtime.settings.options import TrainingOptions
from runtime.settings.preflight import check_plan, check_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.rule import Rule

MIB = 2**20

SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "activations": "activ.",
    "communication": "comm.",
    "temporaries": "temp.",
}
"""Heads of columns."""

NEEDS_TORCHAO = (("precision", "fp8"), ("optimizer", "adam8bit"))
"""Fields of a layout and their values that the runtime leaves to torchao."""


@dataclasses.dataclass(frozen=True)
class DryRunOptions:
    """What is traced and how it is shown."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "What is traced"}

    plan: str | None = flag(None, "Plan file to trace instead of planning.", metavar="FILE")
    stage: int | None = flag(None, "Trace this pipeline rank only.")
    rank: int | None = flag(None, "Trace this rank only.")
    json: bool = flag(False, "Print one JSON object instead of tables.")


@takes(
    unused=pasted(but=DryRunOptions, trains=True),
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
    """Run the training step of a plan without GPUs or memory, and show what every stage would hold.

    Traces the best plan of the same flags as planner suggest, or the plan of a file.
    """
    training.check()
    if options.plan is None:
        plan = _planned(model, cluster, reachable(batch, training), parallel, job_rules(training, unused))
    else:
        check_alone(model, batch, parallel, cluster)
        plan = Plan.load(options.plan)
    check_plan(plan, plan.layout.world_size)
    check_training(plan, training, unused)
    idle = without_effect(training, spec=plan.model, layout=plan.layout)
    for line in (*idle, *not_used(unused, "a dry run")):
        print(f"planner: note: {line}", file=sys.stderr)
    ranks = _ranks(plan, options)
    _check_installed(plan)
    traces = _trace(plan, training, ranks)
    if options.json:
        print(json.dumps(as_json(plan, traces), indent=2))
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
    asked = search_arguments(spec, cluster, batch, parallel, rules)
    result = search(spec, world_size=cluster.required_world_size(), **asked)
    if not result.feasible:
        raise advice.no_layout_fits(result)
    idle = idle_links(cluster, result.problem.cluster)
    for note in (*model.notes(), *cluster.notes(), *parallel.notes(), *idle):
        print(f"planner: assumed: {note}", file=sys.stderr)
    return result.plans(1)[0]


def _ranks(plan: Plan, options: DryRunOptions) -> list[int]:
    """The ranks to trace: one of each stage where none is asked for."""
    layout = plan.layout
    stages, of_stage = layout.pipeline_parallel, layout.world_size // layout.pipeline_parallel
    if options.stage is not None and options.rank is not None:
        raise InputError("--stage and --rank exclude each other; give one")
    if options.rank is not None:
        if not 0 <= options.rank < layout.world_size:
            raise InputError(f"--rank {options.rank}: the plan has ranks 0 to {layout.world_size - 1}")
        return [options.rank]
    if options.stage is not None:
        if not 0 <= options.stage < stages:
            raise InputError(f"--stage {options.stage}: the plan has pipeline ranks 0 to {stages - 1}")
        return [options.stage * of_stage]
    return [stage * of_stage for stage in range(stages)]


def _check_installed(plan: Plan) -> None:
    if find_spec("torch") is None:
        raise InputError(
            "planner dryrun runs the real training step: install torch, on a laptop its CPU build"
        )
    for field, value in NEEDS_TORCHAO:
        if getattr(plan.layout, field) == value and find_spec("torchao") is None:
            raise InputError(
                f"{field} {value}: torchao is not installed; `pip install torchao`, or pin another {field}"
            )


def _trace(plan: Plan, training: TrainingOptions, ranks: Sequence[int]) -> list[MemoryTrace]:
    found = []
    with Status() as status:
        status.tell("loading PyTorch")
        # Only here: it takes seconds, and bad input should not wait for it.
        with leaving_at_ctrl_c():
            from runtime.dryrun.ranks import trace_ranks

        on_gpu = plan.cluster.device.kind != "cpu"
        traces = trace_ranks(
            plan.model,
            plan.layout,
            ranks,
            compiled=training.compiles(plan.layout, on_gpu),
            device="cuda" if on_gpu else "cpu",
            options=training,
            processes=available_cores(),
        )
        what = "stage" if len(ranks) == plan.layout.pipeline_parallel else "rank"
        for number in range(1, len(ranks) + 1):
            status.tell(f"tracing {what} {number} of {len(ranks)}")
            found.append(next(traces))
    return found


def as_json(plan: Plan, traces: Sequence[MemoryTrace]) -> dict[str, Any]:
    """The answer of `planner dryrun --json`; sizes in bytes."""
    return {
        "model": plan.model.name,
        "layout": plan.layout.model_dump(mode="json"),
        "device": plan.cluster.device.name,
        "compiled": traces[0].compiled,
        "ranks": [
            trace.as_json()
            | {"needed_bytes": _needed(plan, trace), "fits": _fits(plan, trace)}
            | {"estimate": _estimated(plan, trace)}
            for trace in traces
        ],
    }


def _needed(plan: Plan, trace: MemoryTrace) -> float:
    """Bytes that a device must have: the traced tensors, and what the plan adds for all that is none."""
    return trace.peak.total + plan.estimate.memory[trace.pipeline_rank].overhead


def _fits(plan: Plan, trace: MemoryTrace) -> bool:
    return _needed(plan, trace) <= plan.cluster.memory_bytes


def _estimated(plan: Plan, trace: MemoryTrace) -> dict[str, float]:
    """What the plan's estimate says of the same tensors."""
    memory = plan.estimate.memory[trace.pipeline_rank]
    return {"bytes": _tensors(memory), **{name: getattr(memory, name) for name in CATEGORIES}}


def _tensors(memory: StageMemory) -> float:
    return float(sum(getattr(memory, name) for name in CATEGORIES))


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
            f"{_tensors(plan.estimate.memory[trace.pipeline_rank]) / unit:.2f}",
            trace.peak.label,
        ]
        for trace in traces
    ]
    screen.print(
        table(["pp", "rank", f"peak ({name})", f"planned ({name})", "moment"], peaks, left=("moment",))
    )
    screen.print(f"\nwhat is alive at the peak ({name})")
    rows = [
        [str(trace.pipeline_rank), *(f"{trace.peak.allocated[key] / unit:.2f}" for key in CATEGORIES)]
        for trace in traces
    ]
    screen.print(table(["pp", *(SHORT.get(key, key) for key in CATEGORIES)], rows))
    kinds = list(dict.fromkeys(kind for trace in traces for kind in trace.peak.layers))
    if kinds:
        by_kind = [
            [str(trace.pipeline_rank), *(f"{trace.peak.layers.get(kind, 0) / unit:.2f}" for kind in kinds)]
            for trace in traces
        ]
        screen.print(f"\nactivations ({name}) by the kind of layer that keeps them")
        screen.print(table(["pp", *kinds], by_kind))
    for trace in traces:
        if not _fits(plan, trace):
            screen.print(
                f"\npipeline rank {trace.pipeline_rank} does not fit: its tensors, the driver's context and "
                f"communicators take {_needed(plan, trace) / unit:.2f} {name} of "
                f"{plan.cluster.memory_bytes / unit:.2f}"
            )
    if any(trace.host_bytes for trace in traces) and (
        plan.layout.offload_activations or plan.layout.offload_optimizer
    ):
        host = max(trace.host_bytes for trace in traces)
        screen.print(f"\nhost memory: {host / unit:.2f} {name} a rank")
