"""A comparison of two plans, or of two runs, field by field."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from costmodels.spec.layout import SHORT_NAMES, Layout
from planner.plan import Plan


def differing_fields(first: Plan, second: Plan) -> dict[str, tuple[str, str]]:
    """Fields of cluster, engine and layout in which two plans of one model differ, as text."""
    found: dict[str, tuple[str, str]] = {}
    parts = {
        "devices": (first.cluster.world_size, second.cluster.world_size),
        "device": (first.cluster.device.name, second.cluster.device.name),
        "devices per node": (first.cluster.devices_per_node, second.cluster.devices_per_node),
        "engine": (first.engine.name, second.engine.name),
    }
    for name in Layout.model_fields:
        parts[SHORT_NAMES.get(name, name)] = (getattr(first.layout, name), getattr(second.layout, name))
    for name, (one, other) in parts.items():
        if one != other:
            found[name] = _text(one), _text(other)
    return found


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    # Stages of equal layers are told by their number.
    if len(value) > 4 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    return ",".join(map(str, value)) or "-"


def measured_steps(records: Sequence[dict[str, Any]]) -> float | None:
    """Median seconds of the steps that a run has logged; None where it has logged none."""
    timed = (record for record in records if record.get("step_time_s") and not record.get("profiled"))
    steps = [record["step_time_s"] for record in timed]
    return statistics.median(steps) if steps else None
