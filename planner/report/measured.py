"""Measurements of a run, for comparison with the predictions of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from planner.explanation.side_by_side import measured_steps
from planner.history.step_parts import StepParts


def profiled_parts(records: Sequence[dict[str, Any]]) -> StepParts | None:
    """Seconds of the last profiled step by part, scaled to the median step; None without a profile."""
    step = measured_steps(records)
    told = [record["parts"] for record in records if "parts" in record]
    if step is None or not told:
        return None
    try:
        parts = StepParts.model_validate(told[-1])
    except ValidationError:
        return None
    return parts.scaled(step / parts.total) if parts.total else None
