"""Step time and peak memory of a job, from its log."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from planner.history.step_parts import StepParts
from runtime.logs.metrics_file import read_metrics

PROFILED = "profiled"
"""Mark of a record with only profiled steps, whose step time is not usable."""


@dataclass(frozen=True)
class Measurement:
    """Step time and peak memory of a job."""

    step_time_s: float
    """Median seconds of the logged steps, without the first record, which has the warm-up."""
    peak_memory_bytes: int
    """The largest peak bytes of all ranks."""
    parts: StepParts | None = None
    """Seconds of the first rank's step by part, scaled to the step time; None without a profile."""


def measurement(log_dir: str | Path, start: int = 0) -> Measurement | None:
    """Step time and peak memory of a finished job that began after iteration `start`; None without a logged
    step."""
    records = [record for record in read_metrics(log_dir) if record["iteration"] > start]
    steps = [r for r in records if "step_time_s" in r and not r.get(PROFILED)]
    parts = None
    for record in records:
        if "parts" in record:
            with contextlib.suppress(ValidationError):
                parts = StepParts.model_validate(record["parts"])
    return of_records([(record["step_time_s"], record["peak_memory_bytes"]) for record in steps], parts)


def of_records(records: Sequence[tuple[float, int]], parts: StepParts | None = None) -> Measurement | None:
    """A measurement from the seconds and peak bytes of each log line of a run.

    Args:
        parts: parts of a profiled step, which takes longer than other steps.
    """
    if not records:
        return None
    step_time_s = statistics.median(seconds for seconds, _ in records[1:] or records)
    return Measurement(
        step_time_s,
        max(peak for _, peak in records),
        None if parts is None or not parts.total else parts.scaled(step_time_s / parts.total),
    )
