"""The published memory of a row of measurements, and rows that publish nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.calibration.published_cells import Unusable, number
from costmodels.spec.record import GIB

PEAKS = ("allocated", "reserved", "device")
"""Kinds of peaks of a whole step, as the fields of `Measurement` name them."""


def tells_memory_alone(row: Mapping[str, str], known: Mapping[str, Any]) -> bool:
    """Return whether the memory of a row counts and its time does not, by its `row_status`.

    Args:
        known: `measurements.yaml`.

    Raises:
        Unusable: neither counts.
    """
    status = row.get("row_status") or "ok"
    if status in ("ok", "oom"):
        return False
    if status not in known["memory_statuses"]:
        raise Unusable(f"row_status {status}")
    for words, reason in known["no_reading"].items():
        if words in row.get("notes", ""):
            raise Unusable(reason)
    return True


def published_memory(row: Mapping[str, str], known: Mapping[str, Any], unit: float) -> dict[str, Any]:
    """The peaks of a row in bytes, by fields of `Measurement`.

    Args:
        known: `measurements.yaml`.
        unit: bytes of a unit of the peaks that the row calls GiB.

    Raises:
        Unusable: a peak is below 0.
    """
    kind = row.get("mem_kind", "").lower()
    peak, reserved = number(row, "peak_mem_gib"), number(row, "peak_reserved_gib")
    if min(peak or 0.0, reserved or 0.0) < 0:
        raise Unusable("peak memory is out of range")
    if "reserved" in kind and "allocated" not in kind:
        peak, reserved = None, reserved or peak
    device = None
    if any(words in kind for words in known["device_memory"]):
        peak, device = None, peak
    # nanotron logs the peak since it cleared the statistics, which it does after backward.
    step = re.search(r"\bstates_alloc_gib=(\d{1,6}(?:\.\d{1,9})?)", row.get("notes", ""))
    return {
        "allocated_bytes": None if peak is None else peak * unit,
        "reserved_bytes": None if reserved is None else reserved * unit,
        "device_bytes": None if device is None else device * unit,
        "step_bytes": None if step is None else float(step[1]) * GIB,
        "first_rank_only": "rank0" in kind or "first stage" in kind,
        "last_rank_only": "last rank" in kind,
    }


def has_peak(memory: Mapping[str, Any]) -> bool:
    """Return whether a result of `published_memory` holds a peak of a whole step."""
    return any(memory[f"{kind}_bytes"] for kind in PEAKS)
