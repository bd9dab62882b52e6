"""The model's peaks for the kinds of memory that measurements publish, on every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.calibration.measurements import Measurement
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import stage_memory, update_bytes
from costmodels.memory.unit_sizes import row_unit_sizes
from costmodels.ranks.rank_layers import Ranks
from costmodels.ranks.reductions import parts_total
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable

MEMORY_KINDS = ("allocated", "reserved", "device", "step")
"""Kinds of peaks, as fields of `Measurement` and `Predictions` name them: tensors, memory reserved by the
allocator, used memory by the driver, and tensors during the optimizer step."""


def published_peak(measurement: Measurement, kind: str) -> float | None:
    """The published peak of one of `MEMORY_KINDS`, in bytes."""
    peak: float | None = getattr(measurement, f"{kind}_bytes")
    return peak


def predicted_peaks(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, ranks: Ranks
) -> dict[str, Floats]:
    """Bytes of each of `MEMORY_KINDS` on every pipeline rank, [n, k].

    PyTorch counts neither the driver's context nor the buffers of communicators.

    Args:
        engine: with its constants for the device.
        ranks: as `ranks_of_table` has them.
    """
    sizes = row_unit_sizes(model, engine, *distinct_shapes(table))
    held = stage_memory(cluster, engine, table, sizes, ranks)
    # The memory that is kept for safety is no prediction of the memory that is used.
    device = parts_total(held) - held["doubt"]
    reserved = device - held["context"] - held["communicators"] - held["margin"]
    return {
        "allocated": reserved - held["reserve"],
        "reserved": reserved,
        "device": device,
        "step": update_bytes(engine, table, sizes, ranks),
    }


def of_measured_ranks(peaks: Floats, rows: Sequence[Measurement], table: LayoutTable) -> Floats:
    """Peaks of the pipeline rank that each row of measurements is about: the first, the last or the fullest,
    [n].

    Args:
        peaks: those of all ranks, [n, k].
    """
    last = np.minimum(table.pipeline_parallel, peaks.shape[1]) - 1
    found: Floats = np.where([row.first_rank_only for row in rows], peaks[:, 0], peaks.max(axis=1))
    own = peaks[np.arange(len(peaks)), last]
    return np.where([row.last_rank_only for row in rows], own, found)
