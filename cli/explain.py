"""`planner explain`: why the best plan is the best, why others are not, and what would help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cli.tables import console, table
from costmodels.errors import NoLayoutFits
from costmodels.words import GIB, in_seconds
from planner.asked import search_arguments
from planner.comparison import Comparison, Term
from planner.explanation import Explanation, explain_plan
from planner.explanation import explain as explained
from planner.figures import NAMES, figure, in_words
from planner.flags import flag, ignored, takes
from planner.neighbours import Neighbour
from planner.objective import Objective
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions, check_alone
from planner.plan import Plan
from planner.verdict import Verdict
from runtime.faults.options import FaultOptions
from runtime.options import DataOptions, OutputOptions, TrainingOptions

if TYPE_CHECKING:
    from rich.console import Console

MOST_TERMS = 6
"""Terms of the step time and of the memory that a table of two plans lists; the totals follow."""

MOST_NEIGHBOURS = 14
"""Steps from the best plan that are listed."""

SHOWN = 2e-3
"""Share of a total under which a term is left out."""

OUTCOMES = {"first": "is the best", "slower": "lost", "too_big": "does not fit", "illegal": "is illegal"}


@dataclass(frozen=True)
class Questions:
    """What is to be explained."""

    plan: str | None = flag(None, "Plan file to explain, instead of a job's flags.", metavar="FILE")
    layout: list[str] = flag(
        [],
        "Why not this layout? Some of its degrees, such as tp=16,pp=2, or all as they are printed; others "
        "are chosen as is best for it. Repeatable.",
        metavar="DEGREES",
    )
    against: list[str] = flag(
        [], "Compare the best plan with this layout too, term by term; repeatable.", metavar="DEGREES"
    )
    no_what_if: bool = flag(
        False, "Do not search again with one change of the job, which takes as long as six searches."
    )
    json: bool = flag(False, "Print one JSON object instead of tables.")


@takes(
    unused=ignored(TrainingOptions, DataOptions, OutputOptions, FaultOptions, but=Questions),
    model=ModelOptions,
    cluster=ClusterOptions,
    batch=BatchOptions,
    parallel=ParallelOptions,
    questions=Questions,
)
def explain(
    model: ModelOptions,
    cluster: ClusterOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    questions: Questions,
    unused: object,
) -> None:
    """Explain the best layout of a job: why it won, why others lost, what holds it back, what would help.

    The other flags of a training command are accepted too; none is used.
    """
    if questions.plan is not None:
        check_alone(model, cluster, batch, parallel)
        found = explain_plan(
            Plan.load(questions.plan),
            layout=questions.layout,
            against=questions.against,
            what_if=not questions.no_what_if,
        )
        assumed: list[str] = []
    else:
        spec = model.spec()
        found = explained(
            spec,
            layout=questions.layout,
            against=questions.against,
            what_if=not questions.no_what_if,
            world_size=cluster.required_world_size(),
            **search_arguments(spec, cluster, batch, parallel),
        )
        assumed = [*model.notes(), *cluster.notes()]
    if questions.json:
        print(json.dumps(as_json(found, assumed), indent=2))
    else:
        print_explanation(found, assumed)
    if found.advice is not None:
        raise NoLayoutFits(found.advice)


def print_explanation(found: Explanation, assumed: list[str]) -> None:
    """Everything, for people."""
    from cli.report import header, tied  # Rich is loaded only to draw.

    screen, result = console(), found.result
    for line in header(result, assumed):
        screen.print(line)
    best, objective = result.best, result.problem.objective
    shown = best or result.closest()[0]
    screen.print(f"\n[bold]{'best' if best else 'closest'}[/bold]: {shown.layout.describe()}")
    if best is not None:
        estimate = best.estimate
        low, high = in_seconds(estimate.step_time_low_s), in_seconds(estimate.step_time_high_s)
        screen.print(
            f"step {in_seconds(estimate.step_time_s)} ({low} to {high}), "
            f"{estimate.tokens_per_s:,.0f} tokens/s, {estimate.peak_memory_bytes / GIB:.1f} of "
            f"{best.cluster.memory_bytes / GIB:.1f} GiB"
            + (f", {in_words(objective, figure(objective, best.estimate))}" if objective == "cost" else "")
        )
    for line in tied(result):
        screen.print(line)
    for comparison in found.comparisons:
        _print_comparison(screen, comparison)
    for verdict in found.verdicts:
        screen.print()
        for line in _of_verdict(verdict):
            screen.print(line, markup=False)
    if found.neighbours:
        screen.print("\n[bold]one step from the best[/bold], all else chosen anew")
        for neighbour in found.neighbours[:MOST_NEIGHBOURS]:
            screen.print(f"  {neighbour.change}: {_of_neighbour(neighbour, objective)}", markup=False)
    if found.binding is not None:
        screen.print(f"\n[bold]held back by {found.binding.constraint}[/bold]: {found.binding.reason}")
    for change in found.changes:
        after = change.why_not if change.plan is None else change.plan.layout.describe()
        ratio = "-" if change.ratio is None else f"{change.ratio:.2f} x"
        what = change.what if change.kind == "pin" else f"with {change.what}"
        ranked = _ranked(objective, change.figure)
        screen.print(f"  {ratio:>6} tokens/s{ranked} {what}: {after}", markup=False)


def _print_comparison(screen: Console, comparison: Comparison) -> None:
    ratio = comparison.throughput
    apart = "" if comparison.told_apart else ", which the estimates do not tell apart"
    screen.print(f"\n[bold]against[/bold] {comparison.second.layout.describe()}")
    screen.print(f"{ratio:.4g} x its tokens/s{apart}; for the same tokens:")
    rows = [*_rows(comparison.time, 1e3, "ms", ".4g"), *_rows(comparison.memory, 1 / GIB, "GiB", ".2f")]
    screen.print(table(["", "best", "other", "difference", ""], rows, left=("",)))


def _rows(terms: tuple[Term, ...], scale: float, unit: str, digits: str) -> Iterator[list[str]]:
    first, second = (sum(getattr(term, side) for term in terms) for side in ("first", "second"))
    least = SHOWN * max(first, second)
    shown = [term for term in terms if abs(term.difference) > least][:MOST_TERMS]
    for term in [*shown, Term("step" if unit == "ms" else "fullest device", first, second)]:
        values = (scale * value for value in (term.first, term.second))
        yield [
            term.name.replace("_", " "),
            *(f"{value:{digits}}" for value in values),
            f"{scale * term.difference:+{digits}}",
            unit,
        ]


def _of_verdict(verdict: Verdict) -> Iterator[str]:
    if verdict.outcome == "first" and verdict.comparison is not None:
        # It was not searched; the reason says what it would be.
        yield f"{verdict.asked} {verdict.reason}"
    else:
        yield f"{verdict.asked} {OUTCOMES[verdict.outcome]}: {verdict.reason}"
    if verdict.plan is not None:
        place = f", number {verdict.place:,} of the ranking" if verdict.place else ""
        yield f"  best such layout: {verdict.plan.layout.describe()}{place}"
        yield f"  {verdict.legal:,} such layouts are legal, {verdict.feasible:,} of them fit"
    if verdict.not_searched is not None:
        yield f"  the search leaves it out: {verdict.not_searched}"
    if verdict.outcome == "too_big" and verdict.plan is not None:
        stages = (f"{stage.total / GIB:.1f}" for stage in verdict.plan.estimate.memory)
        yield f"  GiB by pipeline rank: {', '.join(stages)}"


def _ranked(objective: Objective, value: float | None) -> str:
    """The figure that ranks, where it is not the tokens per second, which are there anyway."""
    return "" if value is None or objective == "throughput" else f", {in_words(objective, value)},"


def _of_neighbour(neighbour: Neighbour, objective: Objective) -> str:
    ranked = _ranked(objective, neighbour.figure).rstrip(",")
    if neighbour.ratio is not None:
        return f"{neighbour.ratio:.3f} x the tokens/s{ranked}"
    if neighbour.lacks_gib is not None:
        return f"does not fit, lacks {neighbour.lacks_gib:.1f} GiB"
    if neighbour.were_it_legal is None:
        return f"illegal, {neighbour.rule}"
    return f"illegal, {neighbour.rule} (would be {neighbour.were_it_legal:.3f} x the tokens/s{ranked})"


def as_json(found: Explanation, assumed: list[str]) -> dict[str, Any]:
    """The answer of `planner explain --json`."""
    result, best = found.result, found.result.best
    return {
        "assumed": assumed,
        "considered": result.considered,
        "legal": result.legal,
        "feasible": result.feasible,
        "rejected": result.rejected,
        "objective": result.problem.objective,
        "ranked_by": NAMES[result.problem.objective],
        "best_figure": None if best is None else figure(result.problem.objective, best.estimate),
        "best": _plan(best),
        "closest": None if best else _plan(result.closest()[0]),
        "indistinguishable": found.indistinguishable,
        "comparisons": [_comparison(comparison) for comparison in found.comparisons],
        "verdicts": [
            asdict(replace(verdict, plan=None, comparison=None))
            | {
                "plan": _plan(verdict.plan),
                "comparison": None if verdict.comparison is None else _comparison(verdict.comparison),
            }
            for verdict in found.verdicts
        ],
        "binding": None if found.binding is None else asdict(found.binding),
        "changes": [
            asdict(replace(change, plan=None)) | {"plan": _plan(change.plan)} for change in found.changes
        ],
        "neighbours": [
            asdict(replace(one, layout=None))
            | {"layout": None if one.layout is None else one.layout.model_dump(mode="json")}
            for one in found.neighbours
        ],
        "advice": found.advice,
    }


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    return (
        None
        if plan is None
        else plan.model_dump(mode="json", include={"layout", "estimate", "fits", "reason"})
    )


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "against": comparison.second.layout.model_dump(mode="json"),
        "throughput": comparison.throughput,
        "told_apart": comparison.told_apart,
        "time_s": [asdict(term) for term in comparison.time],
        "memory_bytes": [asdict(term) for term in comparison.memory],
    }
