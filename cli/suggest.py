"""`planner suggest`: rank the layouts of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cli.flag_notes import planning_flag_notes
from cli.training_flags import training_flags
from cli.waiting import waiting
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.network.topology import describe
from costmodels.spec.record import GIB
from planner import advice
from planner.api import search
from planner.budget.goal import Goal, verdict_line
from planner.budget.run import Run, run_lines
from planner.inputs.choice import Choice
from planner.inputs.device import measured_notes
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.layout_notation import micro_batches_in
from planner.inputs.pins import WherePossible
from planner.inputs.written_layout import whole_layout_pins, written_batch
from planner.megatron_plan import OtherPlan, other_plan
from planner.options.batch import BatchOptions
from planner.options.budget import BudgetOptions
from planner.options.cluster import HardwareOptions, WorldSizesOptions
from planner.options.command import epilog_section
from planner.options.flags import flag, flag_groups
from planner.options.limits import AT_LEAST_1
from planner.options.model import ModelOptions
from planner.options.notation import NOTATION
from planner.options.parallel import ParallelOptions
from planner.options.search import announced_devices, assumed_engine, idle_links, search_keywords
from planner.plan import Plan
from planner.problem import Problem
from planner.ranking.distinct import DistinctPlan, distinct_plans
from planner.ranking.result import SearchResult
from planner.ranking.ties import chances, indistinguishable
from runtime.settings.job_rules import job_rules, reachable_batch
from runtime.settings.plan_notes import (
    expert_island_notes,
    head_room,
    headroom_notes,
    headroom_notes_of_sizes,
    needs_head_room,
    optimizer_notes,
    training_notes,
)

if TYPE_CHECKING:
    from planner.world_sizes import Sizes


PLANS = 10
"""Plans that are shown where plans are listed."""


@dataclass(frozen=True)
class Output:
    """What is printed and written."""

    SECTIONS: ClassVar[dict[str, str]] = {"verbose": "Output"}

    verbose: bool = flag(
        False, "Show the ranking, the memory of each pipeline rank and what was rejected too."
    )
    top: int | None = flag(
        None,
        f"Plans of the ranking to show; {PLANS} with --verbose and --json unless given.",
        metavar="PLANS",
        within=AT_LEAST_1,
    )
    json: bool = flag(False, "Print one JSON object instead of bars and tables.")
    dry_run: bool = flag(
        False,
        "Run the training step of the plans that are shown on tensors without memory, and show its peak "
        "beside the estimate; wants PyTorch.",
    )
    save: str | None = flag(None, "Write the best plan to this file.", metavar="FILE")
    timeline: str | None = flag(
        None, "Write the best plan's simulated pipeline for chrome://tracing or Perfetto.", metavar="FILE"
    )


@dataclass(frozen=True)
class GivenLayout:
    """A layout that is written as this command prints them."""

    SECTIONS: ClassVar[dict[str, str]] = {"layout": "Pins"}

    layout: str | None = flag(
        None,
        'Plan this layout, as one is printed: "tp=4+sp pp=8 dp=2 mbs=1 x 8". With its micro batches '
        "it is whole but for zero and recompute, which are chosen where it does not name them, and of that "
        "batch unless a flag gives one; without, all that it does not name is chosen.",
        metavar="LAYOUT",
    )

    def pinned(self, parallel: ParallelOptions) -> ParallelOptions:
        """The flags of degrees with those of the layout."""
        if self.layout is None:
            return parallel
        is_whole = micro_batches_in(self.layout) is not None
        left_out = whole_layout_pins(self.layout)
        return replace(parallel, pin=[*parallel.pin, self.layout, *(left_out if is_whole else ())])

    def of_its_batch(self, batch: BatchOptions, world_size: int | str) -> BatchOptions:
        """The flags of the batch, with that of a layout which names all of it."""
        if self.layout is None or batch.global_batch_size or batch.max_global_batch_size:
            return batch
        size = written_batch(self.layout, world_size if isinstance(world_size, int) else None)
        return batch if size is None else replace(batch, global_batch_size=size)


@flag_groups(
    notes=(epilog_section("How plans are written", NOTATION),),
    late={"unused": lambda: training_flags(but=Output)},
    model=ModelOptions,
    cluster=WorldSizesOptions,
    batch=BatchOptions,
    budget=BudgetOptions,
    parallel=ParallelOptions,
    given=GivenLayout,
    output=Output,
)
def suggest(
    model: ModelOptions,
    cluster: WorldSizesOptions,
    batch: BatchOptions,
    budget: BudgetOptions,
    parallel: ParallelOptions,
    given: GivenLayout,
    output: Output,
    unused: object | None,
) -> None:
    """Rank the parallel layouts of a training job by tokens per second, or by another objective.

    The other flags of a training command are accepted too, so that one can be pasted; those that rule layouts
    out are honoured (--compile, --reset-attention-mask, --rampup-batch-size).
    """
    counted = cluster.device_count() if cluster.world_size is None else None
    world_size = cluster.required_world_size() if counted is None else counted
    spec, failures = model.spec(), budget.failures()
    parallel, batch = given.pinned(parallel), given.of_its_batch(batch, world_size)
    job = search_keywords(spec, cluster, reachable_batch(batch, unused), parallel, job_rules(unused))
    assumed = [*model.notes(), *cluster.notes(), *budget.notes(), *parallel.notes()]
    if output.dry_run:
        _check_dry_run(parallel, world_size)
    if isinstance(world_size, str):
        if output.top is not None:
            raise InputError(
                f"--top {output.top}: of several world sizes only the best plan of each is shown"
            )
        from planner.world_sizes import sizes  # Few questions are about several sizes.

        with waiting("planning for each world size"):
            found = sizes(
                spec,
                world_size=world_size,
                tokens=budget.tokens,
                price_per_hour=budget.price_per_hour,
                deadline_days=budget.deadline_days,
                budget=budget.budget,
                failures=failures,
                **job,
            )
        assumed += [*assumed_engine(parallel, found.problem), *announced_devices(found.problem.cluster)]
        assumed += measured_notes(found.problem.cluster.device)
        _answer_sizes(found, assumed, cluster, parallel, output, unused)
        return
    asked = budget.question()
    with waiting("planning"):
        result = search(spec, world_size=world_size, **job)
        rows = distinct_plans(result, output.top or PLANS)
        other = other_plan(result) if parallel.engine is None else None
    rows = rows or _closest(result, output.top or PLANS)
    with waiting("looking for what would fit"):
        error = None if result.feasible else advice.no_layout_fits(result)
    assumed += [*idle_links(cluster, result.problem.cluster), *measured_notes(result.problem.cluster.device)]
    plans = [row.plan for row in rows]
    shown = (plans if output.json else plans[:1]) if result.feasible else []
    runs = [] if asked is None else [plan.run(asked.run_tokens, asked.price, failures) for plan in shown]
    goal = budget.goal()
    assumed += [*assumed_engine(parallel, result.problem), *announced_devices(result.problem.cluster)]
    notes = [
        *result.notes,
        *_notes(result.problem, plans, cluster, parallel),
        *planning_flag_notes(unused, parallel, result.problem.engine.name),
    ]
    is_listed = output.json or output.verbose or output.top is not None
    traced = _traced_bytes(plans if is_listed else plans[:1]) if output.dry_run and result.feasible else []
    if result.feasible:
        _write(plans[0].model_copy(update={"asked": asked}), output)
    if output.json:
        _print_notes(assumed, notes)
        shown_as = as_json(result, rows, assumed, notes, runs, traced, goal)
        shown_as["megatron"] = None if other is None else other.as_json()
        shown_as["proposals"] = [one.as_json() for one in error.proposals] if error is not None else []
        print(json.dumps(shown_as, indent=2))
    else:
        _print(result, rows, assumed, notes, other, _run_lines(runs, goal), traced, output)
        if error is not None:
            from cli.lines import screen
            from cli.summary import print_proposals

            print_proposals(screen(), error.proposals)
    if error is not None:
        raise error


def _check_dry_run(parallel: ParallelOptions, world_size: int | str) -> None:
    """Raise `InputError` where nothing can be run for --dry-run."""
    from runtime.dryrun.requirements import check_torch

    check_torch("--dry-run runs the real training step", "bf16")
    if isinstance(world_size, str):
        raise InputError(f"--dry-run is about one world size, not {world_size}; give that as a number")
    if parallel.engine not in (None, DEFAULT_ENGINE):
        raise InputError(f"--dry-run runs the engine {DEFAULT_ENGINE}, not {parallel.engine}; leave one out")


def _traced_bytes(plans: Sequence[Plan]) -> list[float]:
    """The bytes that each plan's fullest rank needs by its dry run."""
    from cli.proof import proof_of
    from cli.status import Status
    from runtime.settings.training_options import TrainingOptions

    found = []
    with Status() as status:
        for number, plan in enumerate(plans, 1):
            status.tell(f"plan {number} of {len(plans)}: {plan.layout.describe()}")
            found.append(proof_of(plan, TrainingOptions(), status).needed_bytes)
    return found


def _print(
    result: SearchResult,
    rows: list[DistinctPlan],
    assumed: list[str],
    notes: list[str],
    other: OtherPlan | None,
    run: Sequence[str],
    traced: list[float],
    output: Output,
) -> None:
    """The answer for people."""
    from cli.lines import Screen, screen
    from cli.summary import print_summary

    has_tables = output.verbose or output.top is not None
    shown = Screen() if has_tables else screen()
    saved, told = output.save, (assumed, notes, other)
    print_summary(shown, result, rows, *told, run, traced[:1], saved, is_whole=output.verbose)
    if not has_tables:
        return
    from cli.report import print_details, print_ranking  # Rich is loaded only to draw.

    print_ranking(shown.console, rows, traced)
    if output.verbose:
        print_details(shown.console, result, rows)


def _run_lines(runs: Sequence[Run], goal: Goal) -> list[str]:
    """The run of the first plan, and whether it keeps its goal; nothing where no run was asked for."""
    if not runs:
        return []
    verdict = verdict_line(goal, runs[0])
    return [*run_lines(runs[0]), *([] if verdict is None else [verdict])]


def _closest(result: SearchResult, top: int) -> list[DistinctPlan]:
    """The plans that lack least memory, of a problem for which nothing fits."""
    return [DistinctPlan(place, plan) for place, plan in enumerate(result.closest(top), 1)]


def _answer_sizes(
    found: Sizes,
    assumed: list[str],
    cluster: WorldSizesOptions,
    parallel: ParallelOptions,
    output: Output,
    unused: object | None,
) -> None:
    """Print the plans of several world sizes, and write the one that is best by the objective."""
    chosen, best = found.chosen, found.plan
    plans = {size.world_size: size.plan for size in found.sizes if size.plan is not None}
    notes = [
        *_of_problem(found.problem, cluster),
        *_of_sizes(plans, best, parallel),
        *planning_flag_notes(unused, parallel, found.problem.engine.name),
    ]
    if chosen is not None and best is not None:
        _write(best, output, f", the plan for {chosen.world_size} devices")
    error = None
    if best is None:
        from planner.world_sizes import no_size_fits

        error = no_size_fits(found)
    if output.json:
        from cli.sizes import sizes_json

        _print_notes(assumed, notes)
        proposals = [] if error is None else error.proposals
        print(json.dumps(sizes_json(found, assumed, notes, proposals), indent=2))
    else:
        from cli.sizes import print_sizes

        print_sizes(found, assumed, notes)
    if error is not None:
        raise error


def _print_notes(assumed: list[str], notes: list[str]) -> None:
    """On standard error, beside an answer for programs."""
    for line in [*(f"assumed: {note}" for note in assumed), *(f"note: {note}" for note in notes)]:
        print(f"planner: {line}", file=sys.stderr)


def _write(plan: Plan, output: Output, which: str = "") -> None:
    """The files that are asked for: before anything is printed, as a reader of that may go away."""
    if output.save is not None:
        plan.save(output.save)
        print(f"planner: saved {output.save}{which}", file=sys.stderr)
    if output.timeline is not None:
        plan.timeline().save(output.timeline)
        print(f"planner: saved {output.timeline}{which}", file=sys.stderr)


def _notes(
    problem: Problem, plans: list[Plan], cluster: HardwareOptions, parallel: ParallelOptions
) -> Iterator[str]:
    """Notes on a problem and its plans."""
    yield from _of_problem(problem, cluster)
    yield from _of_plans(plans, parallel)


def _of_problem(problem: Problem, cluster: HardwareOptions) -> Iterator[str]:
    """Notes on a problem, whatever its plans are."""
    if problem.objective == "step-time" and problem.batch.maximum:
        yield (
            f"steps of the largest batch up to {problem.batch.size} that each layout can run are compared; "
            "--global-batch-size compares equal ones"
        )
    yield from _joined(problem, cluster)
    yield from training_notes(problem)


def _joined(problem: Problem, cluster: HardwareOptions) -> Iterator[str]:
    """The network as it was understood, where flags say something of it."""
    if cluster.network():
        yield f"network: {describe(problem.cluster)}"


def _of_plans(plans: list[Plan], parallel: ParallelOptions) -> Iterator[str]:
    """What the figures of plans rest on, and what would lower them."""
    uneven = [plan for plan in plans if needs_head_room(plan)]
    if uneven:
        yield head_room(uneven[0])
    for plan in plans[:1]:
        yield from headroom_notes(plan)
        yield from expert_island_notes(plan)
        yield from optimizer_notes(plan, parallel)


def _of_sizes(plans: dict[int, Plan], best: Plan | None, parallel: ParallelOptions) -> Iterator[str]:
    """Notes on several world sizes: on the recommended plan, and on which of the others leave too little
    memory."""
    uneven = [plan for plan in plans.values() if needs_head_room(plan)]
    if uneven:
        # Of the recommended plan where it has such experts, as the share differs.
        yield head_room(best if best is not None and needs_head_room(best) else uneven[0])
    yield from headroom_notes_of_sizes(plans)
    if best is not None:
        yield from expert_island_notes(best)
        yield from optimizer_notes(best, parallel)


SHARED_FIELDS = {
    "version",
    "model",
    "cluster",
    "engine",
    "objective",
    "preference",
    "considered",
    "legal",
    "feasible",
    "rejected",
    "asked",
}
"""Fields of plans that the answer says once, or not."""


def _at(of_places: Sequence[float], place: int) -> float | None:
    """The chance of the plan at a place, from 1, to be faster than the first; None where it is not known."""
    return of_places[place - 1] if 1 < place <= len(of_places) else None


def as_json(
    result: SearchResult,
    rows: list[DistinctPlan],
    assumed: list[str],
    notes: list[str],
    runs: list[Run],
    traced: list[float],
    goal: Goal,
) -> dict[str, Any]:
    """The answer of `planner suggest --json`; `runs` and `traced` have one for each plan, or none at all."""
    problem, of_places = result.problem, chances(result)
    return {
        "model": problem.model.model_dump(mode="json") | {"parameters": problem.model.parameters},
        "cluster": problem.cluster.model_dump(mode="json"),
        "engine": problem.engine.name,
        "precision": problem.precision,
        "batch": {"size": problem.batch.size, "maximum": problem.batch.maximum},
        "objective": problem.objective,
        "prefer": problem.preference.prefer,
        "headroom_gib": problem.preference.headroom_bytes(problem.cluster.memory_bytes) / GIB,
        "pins": {
            name: str(value) if isinstance(value, (WherePossible, Choice)) else value
            for name, value in problem.pins.items()
        },
        "assumed": assumed,
        "notes": notes,
        "considered": result.considered,
        "legal": result.legal,
        "feasible": result.feasible,
        "rejected": result.rejected,
        "elapsed_s": result.elapsed_s,
        "indistinguishable": indistinguishable(result),
        "fastest_place": result.first_faster + 1 if result.feasible else None,
        "plans": [
            {"place": row.place, "twins": row.twins, "chance_faster": _at(of_places, row.place)}
            | row.plan.model_dump(mode="json", exclude=SHARED_FIELDS)
            | ({"run": asdict(runs[number])} if runs else {})
            | ({"keeps_goal": goal.is_kept(runs[number])} if runs and goal.is_given else {})
            | ({"dry_run_bytes": traced[number]} if traced else {})
            for number, row in enumerate(rows)
        ],
    }
