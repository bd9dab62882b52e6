"""Step time and peak memory of a job, from what it logged."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from runtime.logs.metrics_file import read_metrics


@dataclass(frozen=True)
class Measurement:
    """Step time and peak memory of a job."""

    step_time_s: float
    """Median over the logged steps, the first record left out: it holds the warm-up."""
    peak_memory_bytes: int
    """The largest of all ranks."""


def measurement(log_dir: str | Path, start: int = 0) -> Measurement | None:
    """Step time and peak of a finished job that began after iteration `start`; None without a logged step."""
    steps = [r for r in read_metrics(log_dir) if "step_time_s" in r and r["iteration"] > start]
    if not steps:
        return None
    warm = steps[1:] or steps
    return Measurement(
        statistics.median(record["step_time_s"] for record in warm),
        max(record["peak_memory_bytes"] for record in steps),
    )
