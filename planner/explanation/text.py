"""The parts of an explanation as text: the lines that the command line and `print(explanation)` share."""

from __future__ import annotations

from collections.abc import Iterator

from costmodels.spec.record import GIB, in_seconds
from planner.explanation.changes import Change
from planner.explanation.comparison import Comparison, Term
from planner.explanation.neighbours import Neighbour
from planner.explanation.outcome import Verdict
from planner.objective import Objective, metric
from planner.plan import Plan
from planner.ranking.reasons import metric_text

MOST_TERMS = 6
"""Most terms of step time and of memory in a table of two plans; the totals follow."""

MOST_NEIGHBOURS = 14
"""Most layouts one step from the best plan that are listed."""

LONG_S = 10.0
"""Step time in seconds from which its parts are shown in seconds instead of milliseconds."""

SHOWN = 2e-3
"""Share of a total below which a term is left out."""

OUTCOMES = {"first": "is the best", "slower": "lost", "too_big": "does not fit", "illegal": "is illegal"}

HEADS = ("", "best", "other", "difference", "")
"""Headings of the columns of a comparison."""


def aligned_rows(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Rows of a table with right-aligned numbers."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for name, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield " ".join((name.ljust(widths[0]), *padded)).rstrip()


def cost_line(best: Plan) -> str:
    """The line with the step, tokens per second and memory of the best plan."""
    estimate, objective = best.estimate, best.objective
    low, high = in_seconds(estimate.step_time_low_s), in_seconds(estimate.step_time_high_s)
    return (
        f"step {in_seconds(estimate.step_time_s)} ({low} to {high}), {estimate.tokens_per_s:,.0f} tokens/s, "
        f"{estimate.peak_memory_bytes / GIB:.1f} of {best.cluster.memory_bytes / GIB:.1f} GiB"
        + (f", {metric_text(objective, metric(objective, estimate))}" if objective == "cost" else "")
    )


def lead_line(comparison: Comparison) -> str:
    """The line with the lead of the best plan over another."""
    unsure = "" if comparison.distinguishable else ", within the estimate's error"
    return f"{comparison.throughput:.4g} x its tokens/s{unsure}; for the same tokens:"


def comparison_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Rows of a table of two plans: the terms that differ, and their totals."""
    longest = max(sum(getattr(term, side) for term in comparison.time) for side in ("first", "second"))
    yield from _rows(comparison.time, *((1e3, "ms", ".4g") if longest < LONG_S else (1.0, "s", ".4g")))
    yield from _rows(comparison.memory, 1 / GIB, "GiB", ".2f")


def _rows(terms: tuple[Term, ...], scale: float, unit: str, digits: str) -> Iterator[tuple[str, ...]]:
    first, second = (sum(getattr(term, side) for term in terms) for side in ("first", "second"))
    least = SHOWN * max(first, second)
    shown = [term for term in terms if abs(term.difference) > least][:MOST_TERMS]
    for term in [*shown, Term("fullest device" if unit == "GiB" else "step", first, second)]:
        values = (scale * value for value in (term.first, term.second))
        yield (
            term.name.replace("_", " "),
            *(f"{value:{digits}}" for value in values),
            f"{scale * term.difference:+{digits}}",
            unit,
        )


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """The lines on the fate of a layout."""
    if verdict.outcome == "first" and verdict.comparison is not None:
        # It was not searched; the reason says what it would be.
        yield f"{verdict.degrees} {verdict.reason}"
    else:
        yield f"{verdict.degrees} {OUTCOMES[verdict.outcome]}: {verdict.reason}"
    if verdict.plan is not None:
        place = f", number {verdict.place:,} of the ranking" if verdict.place else ""
        yield f"  best match: {verdict.plan.layout.describe()}{place}"
        yield f"  {_counted(verdict.legal, verdict.feasible)}"
    if verdict.not_searched is not None:
        yield f"  the search leaves it out: {verdict.not_searched}"
    if verdict.outcome == "too_big" and verdict.plan is not None:
        stages = (f"{stage.total / GIB:.1f}" for stage in verdict.plan.estimate.memory)
        yield f"  GiB by pipeline rank: {', '.join(stages)}"


def _counted(legal: int, feasible: int) -> str:
    """A phrase with the numbers of matching layouts that are legal and that fit."""
    if legal == 1:
        return f"1 matching layout is legal and {'fits' if feasible else 'does not fit'}"
    return f"{legal:,} matching layouts are legal, {feasible:,} of them fit"


def neighbour_line(neighbour: Neighbour, objective: Objective) -> str:
    """The line on a layout one step from the best."""
    return f"  {neighbour.change}: {_of_neighbour(neighbour, objective)}"


def _of_neighbour(neighbour: Neighbour, objective: Objective) -> str:
    ranked = _ranked(objective, neighbour.figure).rstrip(",")
    if neighbour.ratio is not None:
        return f"{neighbour.ratio:.3f} x the tokens/s{ranked}"
    if neighbour.lacks_gib is not None:
        return f"does not fit, lacks {neighbour.lacks_gib:.1f} GiB"
    if neighbour.were_it_legal is None:
        return f"illegal, {neighbour.rule}"
    return f"illegal, {neighbour.rule} (would be {neighbour.were_it_legal:.3f} x the tokens/s{ranked})"


def change_line(change: Change, objective: Objective) -> str:
    """The line on the gain of one change of the job."""
    after = change.why_not if change.plan is None else change.plan.layout.describe()
    ratio = "-" if change.ratio is None else f"{change.ratio:.2f} x"
    what = change.what if change.kind == "pin" else f"with {change.what}"
    return f"  {ratio:>6} tokens/s{_ranked(objective, change.figure)} {what}: {after}"


def _ranked(objective: Objective, value: float | None) -> str:
    """The figure that plans are ranked by; empty for tokens per second, as the line shows them anyway."""
    return "" if value is None or objective == "throughput" else f", {metric_text(objective, value)},"
