"""What `planner suggest` prints for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from cli.tables import billions, console, table
from costmodels.estimate import Estimate, StageMemory, StepTime
from costmodels.layout import Layout
from costmodels.words import GIB
from planner.pins import PinValue
from planner.plan import Plan
from planner.ranking import SearchResult

NARROW = 78
"""Columns of a terminal under which a layout is one word, not a column for each degree."""

ALWAYS = ("tp", "pp", "vpp", "dp", "zero", "mbs", "recompute")
"""Columns that are shown even where they hold nothing unusual."""

MOST_RANKS = 6
"""Pipeline ranks whose memory is listed; of more, the first, the last and the fullest ones."""


def print_report(result: SearchResult, plans: list[Plan], assumed: list[str], notes: list[str]) -> None:
    """Header, ranking, the winner in detail, and what was rejected."""
    screen = console()
    for line in _header(result, assumed):
        screen.print(line)
    for note in notes:
        screen.print(f"note: {note}", markup=False)
    screen.print()
    _print_ranking(screen, plans)
    screen.print()
    _print_winner(screen, plans[0])
    if result.rejected:
        counts = ", ".join(f"{rule} {count:,}" for rule, count in result.rejected.items())
        screen.print(f"rejected: {counts}")


def _header(result: SearchResult, assumed: list[str]) -> Iterator[str]:
    problem, cluster = result.problem, result.problem.cluster
    batch = f"{'at most ' if problem.batch.maximum else ''}{problem.batch.size} sequences a step"
    per_node = min(cluster.world_size, cluster.devices_per_node)
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {per_node}"
    yield (
        f"[bold]{problem.model.name}[/bold]: {billions(problem.model.parameters)} parameters, "
        f"seq {problem.model.seq}, {problem.precision}, {batch}"
    )
    yield (
        f"{cluster.world_size} x {cluster.device.name} of {cluster.memory_bytes / GIB:.1f} GiB, {nodes}, "
        f"engine {problem.engine.name}"
    )
    for note in assumed:
        yield f"assumed: {note}"
    if problem.pins:
        pinned = (f"{name}={_pinned(value)}" for name, value in problem.pins.items())
        yield "pinned: " + ", ".join(pinned)
    yield (
        f"{result.considered:,} layouts considered, {result.legal:,} legal, {result.feasible:,} fit; "
        f"{result.elapsed_s:.3f} s"
    )


def _pinned(value: PinValue) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _print_ranking(screen: Console, plans: list[Plan]) -> None:
    costs = ["step", "tokens/s/dev", "MFU", "GiB"]
    degrees = [_degrees(plan.layout) for plan in plans]
    names = [name for name in degrees[0] if name in ALWAYS or any(row[name] for row in degrees)]
    extra = sum(
        max(len(name), *(len(row[name]) for row in degrees)) + 1 for name in names if name not in ALWAYS
    )
    if screen.width < NARROW + extra:
        rows = [
            [str(rank), plan.layout.describe(), *_costs(plan.estimate)] for rank, plan in enumerate(plans, 1)
        ]
        screen.print(table(["#", "layout", *costs], rows, left=("layout",)))
        return
    rows = [
        [str(rank), *(row[name] for name in names), *_costs(plan.estimate)]
        for rank, (row, plan) in enumerate(zip(degrees, plans, strict=True), 1)
    ]
    screen.print(table(["#", *names, *costs], rows))


def _degrees(layout: Layout) -> dict[str, str]:
    """Words for each column; those of a column that is not always shown are empty for the usual value."""
    context = layout.context_parallel > 1
    usual_schedule = layout.schedule in ("1f1b", "interleaved")
    offloaded = [name for name in ("activations", "optimizer") if getattr(layout, f"offload_{name}")]
    return {
        "tp": f"{layout.tensor_parallel}{'+sp' if layout.sequence_parallel else ''}",
        "pp": str(layout.pipeline_parallel),
        "vpp": str(layout.virtual_pipeline_parallel),
        "schedule": "" if usual_schedule else layout.schedule,
        "cp": f"{layout.context_parallel} {layout.context_parallel_form}" if context else "",
        "ep": str(layout.expert_parallel) if layout.expert_parallel > 1 else "",
        "etp": str(layout.expert_tensor_parallel) if layout.expert_tensor_parallel > 1 else "",
        "dp": str(layout.data_parallel),
        "zero": str(layout.zero_stage),
        "copies": str(layout.zero_replicas) if layout.zero_replicas > 1 else "",
        "mbs": f"{layout.micro_batch_size} x {layout.micro_batches}",
        "recompute": layout.describe_recompute(),
        "offload": "+".join(offloaded),
        "optimizer": "" if layout.optimizer == "adam" else layout.optimizer,
        "grads": "" if layout.gradient_reduction == "fp32" else layout.gradient_reduction,
    }


def _costs(estimate: Estimate) -> list[str]:
    return [
        _seconds(estimate.step_time_s),
        f"{estimate.tokens_per_s_per_device:,.0f}",
        f"{100 * estimate.mfu:.1f} %",
        f"{estimate.peak_memory_bytes / GIB:.1f}",
    ]


def _print_winner(screen: Console, plan: Plan) -> None:
    estimate = plan.estimate
    screen.print(f"[bold]{'best' if plan.fits else 'closest'}[/bold]: {plan.layout.describe()}")
    screen.print(f"why: {plan.reason}")
    parts = {name: getattr(estimate.time, name) / estimate.step_time_s for name in StepTime.model_fields}
    shares = [
        f"{name.replace('_', ' ')} {100 * share:.1f} %"
        for name, share in sorted(parts.items(), key=lambda part: -part[1])
        if share >= 5e-4
    ]
    low, high = _seconds(estimate.step_time_low_s), _seconds(estimate.step_time_high_s)
    screen.print(f"step {_seconds(estimate.step_time_s)}: {', '.join(shares)}")
    screen.print(f"range {low} to {high}: holds four of five measured steps")
    screen.print(f"memory in GiB of {plan.cluster.memory_bytes / GIB:.1f}, by pipeline rank:")
    kinds = list(StageMemory.model_fields)
    rows = [
        [
            str(rank),
            str(sum(plan.layout.layers_per_stage[stage] for stage in plan.layout.stages_of(rank))),
            *(f"{getattr(estimate.memory[rank], kind) / GIB:.1f}" for kind in kinds),
            f"{estimate.memory[rank].total / GIB:.1f}",
        ]
        for rank in _ranks_to_show(estimate)
    ]
    names = {"parameters": "params", "gradients": "grads", "activations": "activ.", "optimizer": "optim."}
    screen.print(table(["rank", "layers", *(names.get(kind, kind) for kind in kinds), "total"], rows))


def _ranks_to_show(estimate: Estimate) -> list[int]:
    ranks = range(len(estimate.memory))
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    fullest = sorted(ranks, key=lambda rank: -estimate.memory[rank].total)
    return sorted({0, ranks[-1], *fullest[: MOST_RANKS - 2]})


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
