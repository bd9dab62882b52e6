"""`planner explain`: why the best plan is the best, why others are not, and what would help."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, ClassVar

from cli.flag_notes import planning_flag_notes
from cli.tables import console, table
from cli.training_flags import training_flags
from cli.waiting import waiting
from costmodels.dataclass import dataclass
from costmodels.errors import NoLayoutFits
from planner.explanation.comparison import Comparison
from planner.explanation.explanation import Explanation, explain_plan
from planner.explanation.explanation import explain as explained
from planner.explanation.records import as_json
from planner.explanation.text import (
    HEADS,
    MOST_NEIGHBOURS,
    change_line,
    comparison_rows,
    cost_line,
    lead_line,
    neighbour_line,
    verdict_lines,
)
from planner.inputs.pins import pin_words
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.flags import flag, flag_groups
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions, check_alone
from planner.options.search import (
    announced_devices,
    assumed_engine,
    assumed_loads,
    idle_links,
    search_keywords,
)
from planner.plan import Plan
from planner.proposals.proposal import proposal_lines
from planner.ranking.distinct import distinct_plans
from planner.ranking.first_plans import SHOWN
from runtime.settings.job_rules import job_rules, reachable_batch

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Questions:
    """The plan, the layouts and the changes to explain."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "Questions"}

    plan: str | None = flag(None, "Plan file to explain, instead of a job's flags.", metavar="FILE")
    layout: list[str] = flag(
        [],
        "Explain why this layout was not chosen: some of its degrees, such as tp=16,pp=2, or all as "
        "plans print them. The search chooses the other degrees. Repeatable.",
        metavar="DEGREES",
        values=pin_words,
    )
    against: list[str] = flag(
        [],
        "Compare the best plan with this layout too, term by term; repeatable.",
        metavar="DEGREES",
        values=pin_words,
    )
    no_what_if: bool = flag(
        False,
        "Leave out the searches with one change of the job, each of which takes as long as the first search.",
    )
    json: bool = flag(False, "Print one JSON object instead of tables.")


@flag_groups(
    unused=training_flags(but=Questions),
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
    """Explain the best layout: why it won, why others lost, its bottleneck, and changes that would help.

    The other flags of a training command are accepted too; flags that rule out layouts are honoured
    (--compile, --reset-attention-mask, --rampup-batch-size).
    """
    if questions.plan is not None:
        check_alone(model, cluster, batch, parallel)
        with waiting("explaining"):
            found = explain_plan(
                Plan.load(questions.plan),
                layout=questions.layout,
                against=questions.against,
                what_if=not questions.no_what_if,
            )
        assumed: list[str] = []
    else:
        spec = model.spec()
        with waiting("explaining"):
            found = explained(
                spec,
                layout=questions.layout,
                against=questions.against,
                what_if=not questions.no_what_if,
                world_size=cluster.required_world_size(),
                **search_keywords(spec, cluster, reachable_batch(batch, unused), parallel, job_rules(unused)),
            )
        assumed = [
            *model.notes(),
            *cluster.notes(),
            *parallel.notes(),
            *assumed_engine(parallel, found.result.problem),
            *announced_devices(found.result.problem.cluster),
            *idle_links(cluster, found.result.problem.cluster),
            *assumed_loads(found.result.best),
        ]
    for note in planning_flag_notes(unused, parallel, found.result.problem.engine.name):
        print(f"planner: note: {note}", file=sys.stderr)
    if questions.json:
        print(json.dumps(as_json(found, assumed), indent=2))
    else:
        print_explanation(found, assumed)
    if found.advice is not None:
        raise NoLayoutFits(found.advice, found.result.closest()[0], found.proposals)


def print_explanation(found: Explanation, assumed: list[str]) -> None:
    """Print the whole explanation for people."""
    from cli.summary import header_lines, tie_line  # Rich is loaded only to draw.

    screen, result = console(), found.result
    for line in (*header_lines(result), *(f"assumed: {note}" for note in assumed)):
        screen.print(line, markup=False)
    best, objective = result.best, result.problem.objective
    shown = best or result.closest()[0]
    screen.print(f"\n[bold]{'best' if best else 'closest'}[/bold]: {shown.layout.describe()}")
    if best is not None:
        screen.print(cost_line(best))
    ties = tie_line(result, distinct_plans(result, SHOWN))
    if ties is not None:
        screen.print(ties)
    for comparison in found.comparisons:
        _print_comparison(screen, comparison)
    for verdict in found.verdicts:
        screen.print()
        for line in verdict_lines(verdict):
            screen.print(line, markup=False)
    if found.neighbours:
        screen.print("\n[bold]change one setting, re-optimise the rest[/bold]")
        for neighbour in found.neighbours[:MOST_NEIGHBOURS]:
            screen.print(neighbour_line(neighbour, objective), markup=False)
    if found.binding is not None:
        screen.print(f"\n[bold]bottleneck: {found.binding.constraint}[/bold]. {found.binding.reason}")
    for change in found.changes:
        screen.print(change_line(change, objective), markup=False)
    if found.proposals:
        screen.print()
    for line in proposal_lines(found.proposals):
        screen.print(line, markup=False)


def _print_comparison(screen: Console, comparison: Comparison) -> None:
    screen.print(f"\n[bold]against[/bold] {comparison.second.layout.describe()}")
    screen.print(lead_line(comparison))
    screen.print(table(HEADS, comparison_rows(comparison), left=("",)))
