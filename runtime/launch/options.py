"""Flags of `planner launch`: how a job is started on this machine, and which plans are tried before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.errors import InputError
from planner.options.flags import flag
from planner.options.limits import MOST_STEPS, Bounds, check_bounds
from runtime.job.job import RunOptions
from runtime.settings.options import OutputOptions
from runtime.settings.preflight import RESTARTS

FEWEST_ITERS = 2
"""Steps of a trial at least: the first one warms up and does not count."""

DEFAULT_ITERS = 5
"""Steps of a trial where no flag says how many."""


@dataclass(frozen=True)
class LaunchOptions(RunOptions):
    """How the job is started."""

    plan: str | None = flag(None, "Plan file to run instead of planning.", metavar="FILE")
    dry_run: bool = flag(False, "Print the torchrun command and stop.")
    max_restarts: int = flag(
        0,
        "Start the job again from its last checkpoint after so many failures, such as a killed rank.",
        within=RESTARTS,
    )

    def check(self, output: OutputOptions) -> None:
        """Raise `InputError` for values that make no sense."""
        check_bounds(self)
        if self.max_restarts and output.save is None:
            raise InputError("--max-restarts needs --save FOLDER, whose last checkpoint is gone on from")


@dataclass(frozen=True)
class TrialOptions:
    """How plans are tried before the job starts."""

    SECTIONS: ClassVar[dict[str, str]] = {"plans_to_try": "Job"}

    plans_to_try: int | None = flag(
        None,
        "Measure the first N plans for a few steps each on this machine, and train with the one that "
        "--objective likes best.",
        "--try",
        metavar="N",
        within=Bounds("a number of plans of at least 1", 1),
    )
    try_iters: int | None = flag(
        None,
        f"With --try: steps of each plan, of which the first warms up; {DEFAULT_ITERS}.",
        within=Bounds(f"at least {FEWEST_ITERS} steps", FEWEST_ITERS, MOST_STEPS),
    )

    def check(self, plan: str | None, dry_run: bool) -> None:
        """Raise `InputError` for numbers that are none, and beside flags that leave nothing to try."""
        check_bounds(self)
        if self.plans_to_try is None:
            if self.try_iters is not None:
                raise InputError(f"--try-iters {self.try_iters} needs --try, the number of plans to measure")
            return
        if plan is not None:
            raise InputError(
                f"--try {self.plans_to_try} chooses among plans, and --plan {plan} is one; give either"
            )
        if dry_run:
            raise InputError(f"--try {self.plans_to_try} runs plans, and --dry-run runs none; give either")

    @property
    def iterations(self) -> int:
        """Steps of each trial."""
        return DEFAULT_ITERS if self.try_iters is None else self.try_iters
