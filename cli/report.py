"""The details of an answer of `planner suggest`: the ranking, and the winner's step and memory by part."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from cli.tables import table, table_width
from costmodels.spec.estimate import Estimate, StageMemory, StepTime
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB, in_seconds
from planner.pipeline_ranks import device_ranks
from planner.plan import Plan
from planner.ranking.distinct import DistinctPlan
from planner.ranking.result import SearchResult

USUAL_COLUMNS = ("tp", "pp", "vpp", "dp", "zero", "mbs", "recompute")
"""Columns that are shown even if every value in them is the usual one."""

USUAL_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits")
"""Parts of memory that are listed even where they are empty."""

SHORT_HEADINGS = {
    "parameters": "params",
    "gradients": "grads",
    "activations": "activ.",
    "optimizer": "optim.",
    "communication": "comm.",
    "temporaries": "temp.",
    "reserve": "resv.",
    "context": "ctx.",
    "communicators": "NCCL",
    "doubt": "range",
}
"""Headings of the parts of memory; the others are headed by their names."""

MOST_RANKS = 6
"""Most pipeline ranks whose memory is listed; if there are more: the first, the last and the fullest ones."""


def print_details(screen: Console, result: SearchResult, rows: Sequence[DistinctPlan]) -> None:
    """Print why the winner won, the parts of its step, its memory, and counts of rejected layouts."""
    screen.print()
    _print_winner(screen, rows[0].plan)
    if result.rejected:
        counts = ", ".join(f"{rule} {count:,}" for rule, count in result.rejected.items())
        screen.print(f"rejected: {counts}")


def print_ranking(screen: Console, listed: Sequence[DistinctPlan], traced: Sequence[float]) -> None:
    """Print a row for each of the first plans; `traced` has their bytes by dry runs, if these were made."""
    screen.print()
    costs = ["step", "tokens/s/dev", "MFU", "GiB", *(["dry run"] if traced else [])]
    figures = [_costs(row.plan.estimate) for row in listed]
    for cells, size in zip(figures, traced, strict=False):
        cells.append(f"{size / GIB:.1f}")
    degrees = [_degrees(row.plan.layout) | {"twins": row.note} for row in listed]
    names = [name for name in degrees[0] if name in USUAL_COLUMNS or any(row[name] for row in degrees)]
    columns = ["#", *names, *costs]
    rows = [
        [str(one.place), *(row[name] for name in names), *cells]
        for row, one, cells in zip(degrees, listed, figures, strict=True)
    ]
    if table_width(columns, rows) <= screen.width:
        screen.print(table(columns, rows))
        return
    # A layout in one word, which may wrap, instead of a column for each degree.
    rows = [
        [str(row.place), row.plan.layout.describe() + row.note_after, *cells]
        for row, cells in zip(listed, figures, strict=True)
    ]
    screen.print(table(["#", "layout", *costs], rows, left=("layout",)))


def _degrees(layout: Layout) -> dict[str, str]:
    """The text of each column; a column that is not always shown has no text for the usual value."""
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
    fullest = max(estimate.memory, key=lambda stage: stage.total)
    return [
        in_seconds(estimate.step_time_s),
        f"{estimate.tokens_per_s_per_device:,.0f}",
        f"{100 * estimate.mfu:.1f} %",
        f"{(estimate.peak_memory_bytes - fullest.absent) / GIB:.1f}",
    ]


def _print_winner(screen: Console, plan: Plan) -> None:
    estimate = plan.estimate
    screen.print(f"why: {plan.reason}")
    parts = {name: getattr(estimate.time, name) / estimate.step_time_s for name in StepTime.model_fields}
    shares = [
        f"{name.replace('_', ' ')} {100 * share:.1f} %"
        for name, share in sorted(parts.items(), key=lambda part: -part[1])
        if share >= 5e-4
    ]
    low, high = in_seconds(estimate.step_time_low_s), in_seconds(estimate.step_time_high_s)
    screen.print(f"step {in_seconds(estimate.step_time_s)}: {', '.join(shares)}")
    screen.print(f"range {low} to {high}: 80 % prediction interval")
    least, most = estimate.peak_memory_low_bytes / GIB, estimate.peak_memory_bytes / GIB
    if estimate.peak_memory_high_bytes:
        most = estimate.peak_memory_high_bytes / GIB
        screen.print(f"a device needs {least:.1f} to {most:.1f} GiB: 80 % prediction interval")
    elif 0 < least < most:
        screen.print(
            f"a device needs {least:.1f} to {most:.1f} GiB by closed forms, of which the latter has to fit"
        )
    given = plan.cluster.memory_margin_bytes is not None
    beside = "the margin given" if given else "the allocator's reserve, driver context and communicators"
    limits = " and ".join(f"{part.memory_bytes / GIB:.1f}" for part in plan.cluster.parts or (plan.cluster,))
    screen.print(f"memory in GiB of {limits}, by pipeline rank: tensors at the peak, {beside}")
    kinds = [
        kind
        for kind in StageMemory.model_fields
        if kind in USUAL_PARTS or (kind != "absent" and _held(estimate, kind))
    ]
    rows = [
        [
            str(rank),
            str(sum(plan.layout.layers_per_stage[stage] for stage in plan.layout.stages_of(rank))),
            *(f"{getattr(estimate.memory[rank], kind) / GIB:.1f}" for kind in kinds),
            f"{(estimate.memory[rank].total - estimate.memory[rank].absent) / GIB:.1f}",
        ]
        for rank in _ranks_to_show(plan)
    ]
    screen.print(
        table(["rank", "layers", *(SHORT_HEADINGS.get(kind, kind) for kind in kinds), "total"], rows)
    )


def _held(estimate: Estimate, kind: str) -> bool:
    return any(getattr(stage, kind) for stage in estimate.memory)


def _ranks_to_show(plan: Plan) -> list[int]:
    estimate = plan.estimate
    ranks = range(len(estimate.memory))
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    fullest = sorted(ranks, key=lambda rank: -estimate.memory[rank].total)
    # Of two kinds, the first and the last rank of each.
    kinds = device_ranks(plan.cluster, plan.layout)
    shown = {0, ranks[-1], *(rank for _, some in kinds for rank in (some[0], some[-1]))}
    return sorted({*shown, *fullest[: MOST_RANKS - len(shown)]})
