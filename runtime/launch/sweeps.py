"""Several short measured runs, stored in a file so that no run is measured twice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodels.errors import InputError
from costmodels.files import read_text
from costmodels.paths import exists
from planner.options.flags import arguments
from planner.plan import Plan
from runtime.job.job import Job
from runtime.launch.trials import Trial
from runtime.logs.line_file import LARGEST_LOG

RESULTS = "sweep.jsonl"


@dataclass(frozen=True)
class Case:
    """One run of a sweep with its results; figures are None if it did not run."""

    key: str
    """A key that differs between runs with different measurements."""
    model: str
    layout: str
    world_size: int
    steps: int
    predicted_s: float | None = None
    measured_s: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    failure: str = ""
    plan: dict[str, Any] | None = None

    def describe(self) -> str:
        """The run in words."""
        return f"{self.model} as {self.layout}"


def case_of(plan: Plan, job: Job, steps: int) -> Case:
    """The case of a plan, before its measurement."""
    told = [
        plan.model.model_dump(mode="json"),
        plan.layout.model_dump(mode="json"),
        plan.cluster.device.name,
        arguments(job.training),
        arguments(job.data),
        steps,
    ]
    return Case(
        key=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16],
        model=plan.model.name,
        layout=plan.layout.describe(),
        world_size=plan.layout.world_size,
        steps=steps,
        predicted_s=plan.estimate.step_time_s,
    )


def refused_case(model: str, layout: str, steps: int, error: InputError) -> Case:
    """The case of a run without a plan."""
    key = hashlib.sha256(json.dumps([model, layout, steps, str(error)]).encode()).hexdigest()[:16]
    return Case(key, model, layout, 0, steps, failure=str(error))


def measured_case(case: Case, trial: Trial) -> Case:
    """A case with its measurements."""
    if trial.measured is None:
        return replace(case, failure=trial.failure or "it did not run")
    return replace(
        case,
        measured_s=trial.measured.step_time_s,
        tokens_per_s=trial.tokens_per_s,
        peak_memory_bytes=trial.measured.peak_memory_bytes,
        plan=trial.plan.model_dump(mode="json"),
    )


class Results:
    """The file of a sweep: a line for each run that has ended."""

    def __init__(self, folder: Path) -> None:
        """Read the existing results; a truncated last line is ignored, so its run is measured again.

        Raises `InputError` for a file that cannot be read.
        """
        self.path = folder / RESULTS
        self.cases: dict[str, Case] = {}
        try:
            text = read_text(self.path, LARGEST_LOG) if exists(self.path) else ""
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.path}: cannot be read ({error})") from None
        for line in text.splitlines():
            try:
                case = Case(**json.loads(line))
            except (ValueError, TypeError):
                continue
            self.cases[case.key] = case
        self.ends_with_line = not text or text.endswith("\n")

    def measured(self, case: Case) -> Case | None:
        """The earlier measurement of a case; None where there is none, or it failed."""
        found = self.cases.get(case.key)
        return None if found is None or found.measured_s is None else found

    def add(self, case: Case) -> None:
        """Store a run; raises `InputError` where the file cannot be written."""
        self.cases[case.key] = case
        try:
            with self.path.open("a") as file:
                file.write("" if self.ends_with_line else "\n")
                file.write(json.dumps(vars(case)) + "\n")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None
        self.ends_with_line = True
