"""`planner timeline`: draw the pipeline of a saved plan, or write it for a trace viewer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cli.tables import console, table
from costmodels.timeline import Event, Timeline
from planner.plan import Plan

if TYPE_CHECKING:
    from rich.text import Text

MOST_RANKS = 16
"""Most pipeline ranks that are drawn; if there are more: the first and the last ones."""

CELLS = 2
"""The least number of columns of a forward pass; where a whole step is too wide, its middle is left out."""

GAP = " ... "
"""The mark for the middle of a step that is not drawn."""

BACKWARD = ("white on green", "black on bright_green")

STYLES = {
    "F": ("white on blue", "black on bright_blue"),
    "B": BACKWARD,
    "I": BACKWARD,
    "W": ("white on magenta", "black on bright_magenta"),
}
"""Styles of the passes of even and of odd chunks of a rank."""

KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def timeline(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan file that --save wrote.")],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="Write a trace for chrome://tracing or ui.perfetto.dev."),
    ] = None,
) -> None:
    """Show when the pipeline ranks of a plan run each microbatch of one step."""
    loaded = Plan.load(plan)
    found = loaded.timeline()
    if out is not None:
        found.save(out)
        print(f"planner: saved {out}", file=sys.stderr)
    print_timeline(loaded, found)


def print_timeline(plan: Plan, found: Timeline) -> None:
    """Draw the passes of each pipeline rank, and print its seconds of work and of waiting."""
    screen = console()
    layout, step = plan.layout, plan.estimate.step_time_s
    screen.print(f"[bold]{plan.model.name}[/bold]: {layout.describe()}")
    ranks = f"{found.ranks} pipeline rank{'s' * (found.ranks > 1)}"
    screen.print(
        f"{layout.micro_batches} microbatch{'es' * (layout.micro_batches > 1)} on {ranks}, schedule "
        f"{layout.schedule}: {found.seconds:.4g} s of a step of {step:.4g} s"
    )
    used = [kind for kind in KINDS if any(event.kind == kind for event in found.passes)]
    screen.print(", ".join(f"{kind} {KINDS[kind]}" for kind in used) + "; a number is that of its microbatch")
    shown = _ranks_to_show(found.ranks)
    label = len(str(found.ranks - 1)) + 1
    for rank, line in zip(shown, timeline_lines(found, shown, screen.width - label), strict=True):
        screen.print(f"{rank:>{label - 1}}", line, no_wrap=True, overflow="crop")
    rows = [
        [
            str(rank),
            f"{found.busy_s[rank]:.4g}",
            f"{found.idle_s[rank]:.4g}",
            f"{100 * found.idle_s[rank] / found.seconds:.1f} %",
        ]
        for rank in shown
    ]
    screen.print(table(["rank", "busy s", "idle s", "idle"], rows))


def _ranks_to_show(count: int) -> list[int]:
    if count <= MOST_RANKS:
        return list(range(count))
    half = MOST_RANKS // 2
    return [*range(half), *range(count - half, count)]


def timeline_lines(found: Timeline, ranks: list[int], width: int) -> list[Text]:
    """A line of `width` columns for each of `ranks`.

    They show the whole step where forward passes stay wide enough to be seen, otherwise its beginning and its
    end.
    """
    forward = [event.end_s - event.start_s for event in found.passes if event.kind == "F"]
    scale = min(found.seconds / width, sum(forward) / len(forward) / CELLS)
    whole = found.seconds / width <= scale
    beginning = width if whole else (width - len(GAP)) // 2
    end = width - beginning - len(GAP)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in found.passes:
        if event.rank in by_rank:
            by_rank[event.rank].append(event)
    lines = []
    for events in by_rank.values():
        line = _cells(events, 0.0, scale, beginning)
        if not whole:
            line.append(GAP, style="dim")
            line.append_text(_cells(events, found.seconds - end * scale, scale, end))
        lines.append(line)
    return lines


def _cells(events: list[Event], start_s: float, scale: float, width: int) -> Text:
    """The passes of a rank in `width` columns of `scale` seconds each, from `start_s` on."""
    from rich.text import Text

    line = Text()
    for event in events:
        first, last = (
            min(max(round((moment - start_s) / scale), 0), width) for moment in (event.start_s, event.end_s)
        )
        if last > first:
            line.append("." * (first - len(line)), style="dim")
            space = last - first
            name = event.name if len(event.name) <= space else event.kind
            line.append(name.ljust(space, "-"), style=STYLES[event.kind][event.chunk % 2])
    line.append("." * (width - len(line)), style="dim")
    return line
