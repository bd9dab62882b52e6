"""The answer of `planner suggest` on one screen: the plan, how to run it, bars, the runner-up, ties."""

import textwrap
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from cli.lines import BLOCKS, FEWEST_COLUMNS, Line, Screen
from cli.tables import parameter_count
from costmodels.spec.estimate import Estimate, StepTime
from costmodels.spec.record import GIB, in_seconds
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.pin_notation import pin_text
from planner.megatron_plan import OtherPlan
from planner.objective import MEANINGS
from planner.pipeline_ranks import device_ranks, idle_shares
from planner.plan import Plan
from planner.proposals.proposal import Proposal, proposal_lines
from planner.ranking.distinct import DistinctPlan
from planner.ranking.reasons import lead_share
from planner.ranking.result import SearchResult
from planner.ranking.ties import chances, indistinguishable, ties_text
from planner.service.commands import run_command

SCREEN = 23
"""Lines of a summary: a terminal of 24 lines, less one for the next prompt."""

LONGEST_BAR, SHORTEST_BAR = 40, 8

LETTERS = "#=."
"""Characters of bars where `BLOCKS` cannot be printed: the full part, the light part, and the rest up to the
end of the range."""

MORE = "--verbose shows the ranking and the memory of each rank, --json everything"

MOST_PARTS = 3
"""Most parts of the step with a bar each; one more bar shows the rest."""

LABEL = 9
"""Columns that the names of lines take."""


class Bar(NamedTuple):
    """A line with a figure and its bar: the shares of the bar that are drawn full and light."""

    name: str
    figure: str
    full: float
    likely: float
    remark: str = ""
    style: str = "cyan"


def print_summary(
    screen: Screen,
    result: SearchResult,
    rows: Sequence[DistinctPlan],
    assumed: Iterable[str],
    notes: Iterable[str],
    other: OtherPlan | None,
    run: Sequence[str],
    traced: Sequence[float],
    saved: str | None,
    is_whole: bool,
) -> None:
    """Print the summary of an answer, the plan first; on a terminal it fits a screen of 24 lines and 80
    columns.

    Args:
        rows: the first plans.
        other: the plan for Megatron-LM, if it was searched.
        run: lines on the run of the first plan, if one was asked for.
        traced: bytes of the first plan by its dry run, if it was made.
        saved: file that the plan is written to.
        is_whole: print all lines, whatever their number.
    """
    plan = rows[0].plan
    lines = [*_plan_lines(screen, plan, saved), Line.of()]
    lines += _bars(screen, [*_figures(plan, traced), *_parts(plan.estimate)])
    lines += [Line.of(), *_rest(screen, result, rows, run)]
    more = [] if is_whole else list(_wrapped(screen, MORE, "dim"))
    said = [f"assumed: {note}" for note in assumed] + [f"note: {note}" for note in notes]
    said += [] if other is None else [f"also: {other}"]
    paragraphs = [list(_wrapped(screen, text)) for text in said]
    room = SCREEN - len(lines) - len(more)
    if screen.is_terminal and not is_whole and sum(map(len, paragraphs)) > room:
        fit = 0
        while sum(map(len, paragraphs[: fit + 1])) < room:
            fit += 1
        left = len(paragraphs) - fit
        hint = f"{left} {'more ' * bool(fit)}note{'s' * (left > 1)}: --verbose"
        paragraphs = [*paragraphs[:fit], [Line.of(hint, "yellow")]]
    for line in (*lines, *chain.from_iterable(paragraphs), *more):
        screen.print(line)


def print_proposals(screen: Screen, found: Sequence[Proposal]) -> None:
    """Print the changes that make a plan fit."""
    if found:
        screen.print(Line.of())
    for line in proposal_lines(found):
        indent = len(line) - len(line.lstrip())
        for part in _wrapped(screen, line, indent=indent + 4 * (indent == 2)):
            screen.print(part)


def header_lines(result: SearchResult) -> Iterator[str]:
    """The job and the number of layouts that were searched, a line each."""
    problem, cluster = result.problem, result.problem.cluster
    batch = f"{'at most ' if problem.batch.maximum else ''}{problem.batch.size} sequences a step"
    per_node = min(cluster.world_size, cluster.devices_per_node)
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {per_node}"
    yield (
        f"{problem.model.name}: {parameter_count(problem.model.parameters)} parameters, "
        f"seq {problem.model.seq}, {problem.precision}, {batch}"
    )
    devices = [
        f"{part.world_size} x {part.device.name} of {part.memory_bytes / GIB:.1f} GiB"
        for part in cluster.parts or (cluster,)
    ]
    yield f"{' and '.join(devices)}, {nodes}, engine {problem.engine.name}"
    if problem.pins:
        yield "pinned: " + ", ".join(pin_text(name, value) for name, value in problem.pins.items())
    yield (
        f"{result.considered:,} layouts considered, {result.legal:,} legal, {result.feasible:,} fit; "
        f"{result.elapsed_s:.3f} s"
    )
    if problem.objective != "throughput":
        yield f"ranked by {problem.objective}: {MEANINGS[problem.objective]}"


def tie_line(result: SearchResult, rows: Sequence[DistinctPlan]) -> str | None:
    """A line on the plans within the estimate's error of the first, or None; `rows` are shown."""
    shown = [row.place for row in rows]
    last = max((row.place + len(row.twins) for row in rows), default=0)
    places = tuple(place for place in indistinguishable(result) if place in shown or place > last)
    words = ties_text(places)
    problem = result.problem
    if words is None or problem.engine.name != DEFAULT_ENGINE or problem.cluster.nodes > 1:
        return words  # Nothing here measures plans of another engine, or of several nodes.
    # Plans are tried in the order of the ranking, those between two that are alike too.
    number = 3 if len(shown) > 2 and list(places[:3]) == shown[:3] else bisect(shown, places[1])
    return f"{words}; planner launch --try {number} measures {number}"


def _wrapped(screen: Screen, text: str, style: str = "", indent: int = 0) -> Iterator[Line]:
    """A paragraph whose further lines are indented; words that are longer than the screen are cut in two."""
    for line in textwrap.wrap(
        text, max(screen.width, FEWEST_COLUMNS), subsequent_indent=" " * indent, break_on_hyphens=False
    ):
        yield Line.of(line, style)


def _plan_lines(screen: Screen, plan: Plan, saved: str | None) -> Iterator[Line]:
    layout = plan.layout.describe()
    if not plan.fits:
        yield from _wrapped(screen, f"closest: {layout}", "bold red", indent=LABEL)
        return
    yield from _wrapped(screen, layout, "bold green")
    if plan.cluster.device.kind in plan.engine.runs.priced_devices:
        yield from _wrapped(screen, f"nothing here runs on {plan.cluster.device.name}", indent=LABEL)
        return
    file = saved or "plan.json"
    nodes = plan.cluster.nodes
    where = f" on each of {nodes} nodes" if nodes > 1 and plan.engine.name == DEFAULT_ENGINE else ""
    how = "" if saved else f" (after --save {file})"
    yield from _wrapped(screen, f"run: {run_command(plan, file)}{where}{how}", indent=5)


def _figures(plan: Plan, traced: Sequence[float]) -> Iterator[Bar]:
    """Bars of the step, the speed, the MFU and the memory."""
    estimate = plan.estimate
    step, low, high = estimate.step_time_s, estimate.step_time_low_s, estimate.step_time_high_s
    yield Bar("step", in_seconds(step), low / high, step / high, f"{in_seconds(low)} to {in_seconds(high)}")
    speed = estimate.tokens_per_s
    least, most = (speed * step / other for other in (high, low))
    remark = f"{estimate.tokens_per_s_per_device:,.0f} a device"
    yield Bar("tokens/s", f"{speed:,.0f}", least / most, speed / most, remark)
    mfu = estimate.mfu
    yield Bar("MFU", f"{100 * mfu:.1f} %", mfu, mfu, "of the data sheet's FLOP/s")
    fullest = max(estimate.memory, key=lambda stage: stage.total)
    held = estimate.peak_memory_bytes - fullest.absent
    limits = [part.memory_bytes for part in plan.cluster.parts or (plan.cluster,)]
    share = min(held / min(limits), 1.0)
    style = "cyan" if plan.fits else "red"
    of = " and ".join(f"{limit / GIB:.1f}" for limit in limits)
    proof = "".join(f", dry run {size / GIB:.1f}" for size in traced)
    yield Bar("memory", f"{held / GIB:.1f} GiB", share, share, f"of {of} GiB{proof}", style)


def _parts(estimate: Estimate) -> Iterator[Bar]:
    """The largest parts of the step, and all others as one."""
    shares = {name: getattr(estimate.time, name) / estimate.step_time_s for name in StepTime.model_fields}
    largest = sorted(shares, key=lambda name: -shares[name])[:MOST_PARTS]
    rest = 1 - sum(shares[name] for name in largest)
    for name in largest:
        yield _part(name.replace("_", " "), shares[name])
    yield _part("all else", rest)


def _part(name: str, share: float) -> Bar:
    return Bar(f"  {name}", f"{100 * share:.1f} %", share, share, "of the step", "blue")


def _bars(screen: Screen, bars: Sequence[Bar]) -> Iterator[Line]:
    """Aligned lines, one for each bar; where the screen is too narrow for bars, figures alone."""
    marks = BLOCKS if screen.encoding.startswith("utf") else LETTERS
    texts = zip(*((bar.name, bar.figure, bar.remark) for bar in bars), strict=True)
    name, figure, remark = (max(map(len, column)) for column in texts)
    length = min(LONGEST_BAR, screen.width - name - figure - remark - 5)
    for bar in bars:
        start = f"{bar.name:{name}} {bar.figure:>{figure}}"
        if length < SHORTEST_BAR:
            yield from _wrapped(screen, f"{start} {bar.remark}", indent=LABEL)
            continue
        full, likely = (round(length * share) for share in (bar.full, bar.likely))
        line = Line.of(f"{start}  ").plus(marks[0] * full + marks[1] * (likely - full), bar.style)
        yield line.plus(marks[2] * (length - likely), "dim").plus(f"  {bar.remark}" if bar.remark else "")


def _rest(
    screen: Screen, result: SearchResult, rows: Sequence[DistinctPlan], run: Sequence[str]
) -> Iterator[Line]:
    """Lines on the run, on the next plan with its gap to the first, on ties, and on the job."""
    for line in (*_of_kinds(rows[0].plan), *run):
        yield from _wrapped(screen, line)
    if len(rows) > 1 and rows[0].plan.fits:
        other = rows[1].plan
        yield from _wrapped(screen, f"next: {other.layout.describe()}", indent=6)
        yield from _wrapped(screen, f"      {_of_next(result, rows[1])}", indent=6)
    ties = tie_line(result, rows)
    if ties is not None:
        yield from _wrapped(screen, f"ties: {ties}", "yellow", indent=6)
    for line in header_lines(result):
        yield from _wrapped(screen, line)


def _of_next(result: SearchResult, row: DistinctPlan) -> str:
    """The line below the next plan: its reason, or its lead over the first plan with the chance that it is
    faster."""
    of_places = chances(result)
    if row.place > len(of_places):
        return row.plan.reason
    likely = f"{100 * of_places[row.place - 1]:.0f} %"
    if row.place - 1 != result.first_faster:
        return f"{row.plan.reason}; {likely} likely to be the faster one"
    first, objective = result.plan(0), result.problem.objective
    share = lead_share(objective, row.plan.estimate, first.estimate)
    return (
        f"{share} faster by the estimate, {likely} likely to be the faster one; "
        f"{_gives_the_fastest(result, row.plan)} gives it"
    )


def _gives_the_fastest(result: SearchResult, fastest: Plan) -> str:
    """The flags that put the fastest plan first."""
    preference, room = result.problem.preference, result.room
    flags = ["--prefer fastest"] if preference.prefer == "simple" else []
    is_short = room.lacks(fastest.estimate) and not room.lacks(result.plan(0).estimate)
    if preference.asks_headroom and is_short:
        flags.append("--headroom 0")
    return " ".join(flags)


def _of_kinds(plan: Plan) -> Iterator[str]:
    """A line for each of two kinds of nodes: its pipeline ranks, their layers and their idle share."""
    if not plan.cluster.parts:
        return
    idle, layout = idle_shares(plan), plan.layout
    layers = [
        sum(layout.layers_per_stage[stage] for stage in layout.stages_of(rank)) for rank in range(len(idle))
    ]
    for device, ranks in device_ranks(plan.cluster, layout):
        least, most = (f"{100 * end(idle[rank] for rank in ranks):.1f}" for end in (min, max))
        waits = f"{least} %" if least == most else f"{least} to {most} %"
        name = f"pipeline ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"pipeline rank {ranks[0]}"
        yield f"{device}: {name}, {sum(layers[rank] for rank in ranks)} layers, idle {waits} of the step"
