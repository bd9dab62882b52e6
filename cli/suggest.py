"""`planner suggest`: rank the layouts of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import ClassVar

from cli.flag_notes import planning_flag_notes
from cli.training_flags import training_flags
from cli.waiting import waiting
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.budget.goal import Goal, verdict_line
from planner.budget.run import Run, run_lines
from planner.inputs.engine import DEFAULT_ENGINE
from planner.options.batch import BatchOptions
from planner.options.budget import BudgetOptions
from planner.options.cluster import WorldSizesOptions
from planner.options.command import epilog_section
from planner.options.flags import flag, flag_groups, groups_of
from planner.options.given_layout import GivenLayout
from planner.options.limits import AT_LEAST_1
from planner.options.messages import command_message
from planner.options.model import ModelOptions
from planner.options.notation import NOTATION
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from planner.service.answers import PLANS, Answer, Question, SizesAnswer, ask
from runtime.settings.job_rules import job_rules, reachable_batch


@dataclass(frozen=True)
class Output:
    """The answer to print and the files to write."""

    SECTIONS: ClassVar[dict[str, str]] = {"verbose": "Output"}

    verbose: bool = flag(
        False, "Show also the ranking, the memory of each pipeline rank and the rejected layouts."
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
        "Run a training step of each shown plan on tensors without memory, and show the peak beside the "
        "estimate; needs PyTorch.",
    )
    save: str | None = flag(None, "Write the best plan to this file.", metavar="FILE")
    timeline: str | None = flag(
        None, "Write the best plan's simulated pipeline for chrome://tracing or Perfetto.", metavar="FILE"
    )


@flag_groups(
    notes=(epilog_section("How plans are written", NOTATION),),
    late={"unused": lambda: training_flags(but=(Output, BudgetOptions))},
    **groups_of(Question),
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

    The other flags of a training command are accepted too, so that one can be pasted; flags that rule out
    layouts are honoured (--compile, --reset-attention-mask, --rampup-batch-size).
    """
    question = Question(model, cluster, reachable_batch(batch, unused), budget, parallel, given)
    if output.dry_run:
        _check_dry_run(parallel, question.world_size)
    if isinstance(question.world_size, str) and output.top is not None:
        raise InputError(f"--top {output.top}: of several world sizes only the best plan of each is shown")
    answer = ask(question, job_rules(unused), output.top or PLANS, waiting)
    problem = answer.found.problem if isinstance(answer, SizesAnswer) else answer.result.problem
    answer.notes.extend(planning_flag_notes(unused, parallel, problem.engine.name))
    if isinstance(answer, SizesAnswer):
        _answer_sizes(answer, output)
    else:
        _answer_one(answer, output)
    if answer.error is not None:
        raise answer.error


def _answer_one(answer: Answer, output: Output) -> None:
    """Print the plans of one world size, and write the best one."""
    is_listed = output.json or output.verbose or output.top is not None
    dry = output.dry_run and answer.result.feasible
    runs = answer.runs(None if output.json else 1)
    traced = _traced_bytes(answer.plans if is_listed else answer.plans[:1]) if dry else []
    if answer.best is not None:
        _write(answer.best, output)
    if output.json:
        _print_notes(answer)
        shown = answer.as_json()
        for plan, size in zip(shown["plans"], traced, strict=False):
            plan["dry_run_bytes"] = size
        print(json.dumps(shown, indent=2))
        return
    _print(answer, _run_lines(runs, answer.goal), traced, output)
    if answer.proposals:
        from cli.lines import screen
        from cli.summary import print_proposals

        print_proposals(screen(), answer.proposals)


def _check_dry_run(parallel: ParallelOptions, world_size: int | str) -> None:
    """Raise `InputError` where --dry-run cannot run."""
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


def _print(answer: Answer, run: Sequence[str], traced: list[float], output: Output) -> None:
    """Print the answer for people."""
    from cli.lines import Screen, screen
    from cli.summary import print_summary

    result, rows = answer.result, answer.rows
    has_tables = output.verbose or output.top is not None
    shown = Screen() if has_tables else screen()
    saved, told = output.save, (answer.assumed, answer.notes, answer.other)
    print_summary(shown, result, rows, *told, run, traced[:1], saved, is_whole=output.verbose)
    if not has_tables:
        return
    from cli.report import print_details, print_ranking  # Rich is loaded only to draw.

    print_ranking(shown.console, rows, traced)
    if output.verbose:
        print_details(shown.console, result, rows)


def _run_lines(runs: Sequence[Run], goal: Goal) -> list[str]:
    """Lines on the run of the first plan and its goal; none where no run was asked for."""
    if not runs:
        return []
    verdict = verdict_line(goal, runs[0])
    return [*run_lines(runs[0], command_message), *([] if verdict is None else [verdict])]


def _answer_sizes(answer: SizesAnswer, output: Output) -> None:
    """Print the plans of several world sizes, and write the one that is best by the objective."""
    found, best = answer.found, answer.best
    if found.chosen is not None and best is not None:
        _write(best, output, f", the plan for {found.chosen.world_size} devices")
    if output.json:
        _print_notes(answer)
        print(json.dumps(answer.as_json(), indent=2))
        return
    from cli.sizes import print_sizes

    print_sizes(found, answer.assumed, answer.notes)


def _print_notes(answer: Answer | SizesAnswer) -> None:
    """Print notes on standard error, beside an answer for programs."""
    notes = [*(f"assumed: {note}" for note in answer.assumed), *(f"note: {note}" for note in answer.notes)]
    for line in notes:
        print(f"planner: {line}", file=sys.stderr)


def _write(plan: Plan, output: Output, which: str = "") -> None:
    """Write the requested files before anything is printed, as the reader of the output may go away."""
    if output.save is not None:
        plan.save(output.save)
        print(f"planner: saved {output.save}{which}", file=sys.stderr)
    if output.timeline is not None:
        plan.timeline().save(output.timeline)
        print(f"planner: saved {output.timeline}{which}", file=sys.stderr)
