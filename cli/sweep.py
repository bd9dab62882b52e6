"""`planner sweep`: several short measured runs on this machine, and a table that compares them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import typer

from cli.tables import table, table_text
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from planner.options.flags import flag, flag_groups, groups_of
from planner.options.limits import MOST_STEPS, Bounds
from planner.options.model import DEFAULT_MODEL
from planner.plan import Plan
from runtime.checkpoint.owner import ownership
from runtime.job.job import Job
from runtime.launch.launch_options import DEFAULT_ITERS, FEWEST_ITERS
from runtime.launch.local_plans import forks_ranks, local_plans
from runtime.launch.supervisor import JobStopped
from runtime.launch.sweeps import RESULTS, Case, Results, case_of, measured_case, refused_case
from runtime.launch.trials import try_plan
from runtime.launch.warm_ranks import WarmRanks
from runtime.logs.console import say
from runtime.settings.checks import check_folder

DEFAULT_PLANS = 3


@dataclass(frozen=True)
class SweepOptions:
    """The layouts to measure and the files that keep the measurements."""

    SECTIONS: ClassVar[dict[str, str]] = {"models": "Sweep"}

    models: str | None = flag(None, "Models to measure, with commas between them.", metavar="NAMES")
    layout: list[str] = flag(
        [],
        "Layout to measure, such as tp=2,pp=2; the search chooses its other degrees. Repeatable.",
        metavar="PINS",
    )
    plans: int | None = flag(
        None,
        f"Plans to measure of each model where no --layout is given; the first {DEFAULT_PLANS}.",
        metavar="N",
        within=Bounds("a number of plans of at least 1", 1, 1000),
    )
    steps: int = flag(
        DEFAULT_ITERS,
        "Steps of each run, the first of which is a warm-up.",
        within=Bounds(f"at least {FEWEST_ITERS} steps", FEWEST_ITERS, MOST_STEPS),
    )
    out: str = flag(
        "sweep", f"Folder of the results ({RESULTS}); runs in it are not measured again.", metavar="FOLDER"
    )

    def check(self) -> None:
        """Raise `InputError` for flags that exclude each other."""
        if self.layout and self.plans is not None:
            raise InputError(f"--plans {self.plans} and --layout: a layout has one plan; give either")


@flag_groups(options=SweepOptions, **groups_of(Job, but=("output", "run", "faults", "preflight")))
def sweep(options: SweepOptions, **groups: Any) -> None:
    """Measure layouts or models for a few steps each on this machine; a sweep that was stopped goes on."""
    options.check()
    job = Job(**groups)
    job.training.check()
    for name in _models(options, job):
        _of_model(job, name).model.spec()  # An unknown one is wrong input, not a run that failed.
    folder = check_folder(options.out, "--out")
    with ownership(folder, f"--out {options.out}"):
        results = Results(folder)
        done: list[Case] = []
        try:
            with WarmRanks() as warm:
                for case in _measured(options, job, results, warm):
                    done.append(case)
        except JobStopped as stop:
            _print(done)
            say(f"planner: stopped by {stop.number.name}; the same command goes on", sys.stderr)
            raise typer.Exit(128 + stop.number) from None
        _print(done)
    if not any(case.measured_s is not None for case in done):
        raise InputError("no run of this sweep has measured anything; the table says why")


def _measured(options: SweepOptions, job: Job, results: Results, warm: WarmRanks) -> Iterator[Case]:
    """The runs of a sweep, each measured or taken from an earlier sweep."""
    for name in _models(options, job):
        of_model = _of_model(job, name)
        for pins in options.layout or [""]:
            pinned = [*job.parallel.pin, *(pin for pin in pins.split(",") if pin)]
            asked = replace(of_model, parallel=replace(job.parallel, pin=pinned))
            try:
                found = local_plans(asked, None, 1 if pins else options.plans or DEFAULT_PLANS, warm)
            except InputError as error:
                shown = name or job.model.model or DEFAULT_MODEL
                yield refused_case(shown, pins or "any layout", options.steps, error)
                continue
            for plan in found.plans:
                yield _run(plan, asked, options.steps, results, warm)


def _of_model(job: Job, name: str | None) -> Job:
    return job if name is None else replace(job, model=replace(job.model, model=name))


def _models(options: SweepOptions, job: Job) -> Sequence[str | None]:
    if options.models is None:
        return [None]
    names = [name.strip() for name in options.models.split(",") if name.strip()]
    if not names or job.model.model is not None:
        raise InputError(
            f"--models {options.models}: expected names with commas between them, and no --model"
        )
    return names


def _run(plan: Plan, job: Job, steps: int, results: Results, warm: WarmRanks) -> Case:
    case = case_of(plan, job, steps)
    earlier = results.measured(case)
    if earlier is not None:
        say(f"measured before: {case.describe()}")
        return earlier
    say(f"measuring {case.describe()}")
    found = measured_case(case, try_plan(plan, steps, job, warm if forks_ranks(plan) else None))
    if found.failure:
        say(f"it failed: {found.failure}")
    results.add(found)
    return found


def _print(cases: Sequence[Case]) -> None:
    """A table with the fastest run of each model first, and then the runs that failed."""
    ran = [case for case in cases if case.measured_s is not None]
    names = list(dict.fromkeys(case.model for case in cases))
    rows = [
        [
            *(case.model, case.layout, f"{case.predicted_s or 0:.4g}", f"{case.measured_s or 0:.4g}"),
            f"{(case.predicted_s or 0) / (case.measured_s or 1):.2f}",
            f"{case.tokens_per_s or 0:,.0f}",
            f"{(case.peak_memory_bytes or 0) / GIB:.3g}",
        ]
        for case in sorted(ran, key=lambda case: (names.index(case.model), case.measured_s or 0))
    ]
    columns = ["model", "layout", "predicted s", "measured s", "ratio", "tokens/s", "peak GiB"]
    if rows:
        say(table_text(table(columns, rows, left=("model", "layout"))))
    for case in cases:
        if case.measured_s is None:
            say(f"{case.describe()}: {case.failure}")
