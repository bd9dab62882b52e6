"""The answer of `planner suggest` for several world sizes: the best plan of each, and time against cost."""

from __future__ import annotations

from collections.abc import Iterator

from cli.tables import console, parameter_count, table
from costmodels.spec.record import GIB, in_seconds
from planner.budget.run import run_lines
from planner.budget.words import scaled_number, short_number
from planner.objective import MEANINGS
from planner.options.messages import command_message
from planner.world_sizes import Size, Sizes


def print_sizes(found: Sizes, assumed: list[str], notes: list[str]) -> None:
    """Print a header, a row for each world size with its layout or the reason why there is none, and the run
    of the chosen size."""
    screen = console()
    for line in _header(found, assumed):
        screen.print(line)
    for note in notes:
        screen.print(f"note: {note}", markup=False)
    screen.print()
    names = ["devices", "front", "step", "tokens/s/dev", "GiB", *_spent_names(found)]
    screen.print(table(names, [_row(found, size) for size in found.sizes]))
    screen.print()
    for size in found.sizes:
        what = size.problem if size.plan is None else size.plan.layout.describe()
        screen.print(f"{size.world_size}: {what}", markup=False)
    screen.print()
    chosen, advice = found.chosen, found.recommendation
    if chosen is None or chosen.run is None or advice is None:
        return
    word = "recommended" if advice.keeps_goal else "closest"
    screen.print(f"[bold]{word}[/bold]: {chosen.world_size} devices", highlight=False)
    screen.print(f"why: {advice.why}", markup=False)
    for line in run_lines(chosen.run, command_message):
        screen.print(line, markup=False)


def _header(found: Sizes, assumed: list[str]) -> Iterator[str]:
    problem = found.problem
    batch = f"{'at most ' if problem.batch.maximum else ''}{problem.batch.size} sequences a step"
    yield (
        f"[bold]{problem.model.name}[/bold]: {parameter_count(problem.model.parameters)} parameters, "
        f"seq {problem.model.seq}, {problem.precision}, {batch}"
    )
    cluster = problem.cluster
    yield f"{cluster.device.name} of {cluster.memory_bytes / GIB:.1f} GiB, engine {problem.engine.name}"
    for note in assumed:
        yield f"assumed: {note}"
    yield f"ranked by {found.objective}: {MEANINGS[found.objective]}"
    if found.goal.is_given:
        yield f"goal: to {found.goal.describe()}"
    yield "front: Pareto-optimal, no other size is both faster and cheaper"


def _fails(found: Sizes) -> bool:
    return any(size.run is not None and size.run.goodput is not None for size in found.sizes)


def _spent_names(found: Sizes) -> list[str]:
    cost = f"cost {found.price.currency}".strip() if found.price is not None else "dev-h"
    kept = ["goodput"] if _fails(found) else []
    return [*kept, "days", cost] if found.tokens is not None else [*kept, "tokens/s", f"{cost}/1B"]


def _row(found: Sizes, size: Size) -> list[str]:
    plan, run = size.plan, size.run
    if plan is None or run is None:
        return [str(size.world_size), "", "no plan", *[""] * (2 + len(_spent_names(found)))]
    estimate = plan.estimate
    goodput = 1.0 if run.goodput is None else run.goodput.share
    return [
        str(size.world_size),
        "*" if size.on_front else "",
        in_seconds(estimate.step_time_s),
        f"{estimate.tokens_per_s_per_device:,.0f}",
        f"{estimate.peak_memory_bytes / GIB:.1f}",
        *([] if run.goodput is None else [f"{100 * goodput:.1f} %"]),
        short_number(run.days) if found.tokens is not None else f"{estimate.tokens_per_s * goodput:,.0f}",
        scaled_number(run.device_hours if run.money is None else run.money),
    ]
