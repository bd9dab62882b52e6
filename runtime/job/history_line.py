"""A job's line in the user's history."""

from __future__ import annotations

import platform
import sys
from datetime import date

from costmodels.catalogue.measured_devices import Machine
from costmodels.pytorch import full_version
from planner.history.file import PastRun, append
from planner.history.step_parts import StepParts, predicted_parts
from planner.plan import Plan
from planner.version import version
from runtime.job.job import Job
from runtime.job.measurement import Measurement
from runtime.job.prediction import predicted_peak, predicted_step
from runtime.logs.console import say

FEWEST_RECORDS = 2
"""Fewest log lines of a run for the history; the first one, with the warm-up, does not count."""


def remember(job: Job, plan: Plan, figures: Measurement, records: int) -> None:
    """Add a run's measurements to the history; an error here is only a note.

    Runs with growing batches are left out, as they have no single step time. So are runs with one log line,
    which includes the warm-up.

    Args:
        records: log lines of the run.
    """
    if job.output.no_history or job.training.rampup_batch_size is not None or records < FEWEST_RECORDS:
        return
    try:
        append(past_run(job, plan, figures, records))
    except Exception as error:
        say(f"note: this run is not in the history ({type(error).__name__}: {error})", sys.stderr)


def past_run(job: Job, plan: Plan, figures: Measurement, records: int) -> PastRun:
    """The record of a run in the history."""
    step, terms = predicted_step(plan), predicted_parts(plan.estimate.time)
    waits = terms.pop("communication")
    return PastRun(
        date=date.today().isoformat(),
        machine=Machine.here(),
        software={
            "planner": version() or "unknown",
            "torch": full_version(),
            "python": platform.python_version(),
        },
        model=plan.model,
        layout=plan.layout,
        cluster=plan.cluster,
        engine=plan.engine.name,
        compiled=job.training.compiles(plan.layout, plan.cluster.device.kind == "gpu"),
        records=records - 1,
        step_time_s=figures.step_time_s,
        peak_memory_bytes=figures.peak_memory_bytes,
        predicted_step_time_s=step.value,
        predicted_low_s=step.low,
        predicted_high_s=step.high,
        predicted_peak_bytes=predicted_peak(plan).value,
        predicted=StepParts(**terms, collectives={"all": waits}),
        parts=figures.parts,
    )
