"""The peaks of memory that measurements publish, as the model has them for every pipeline rank."""

from __future__ import annotations

import numpy as np

from costmodels.calibration.measurements import Measurement
from costmodels.layers.shapes import shapes_of
from costmodels.memory.peak import stage_memory, step_bytes
from costmodels.memory.unit_sizes import sizes_of
from costmodels.ranks.pipeline import FIELDS, Ranks, all_ranks, ranks_entry
from costmodels.ranks.reductions import total
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable

MEMORY_KINDS = ("allocated", "reserved", "device", "step")
"""What peaks count, as fields of `Measurement` and `Predictions` name them: tensors, what the allocator
reserves for them, what the driver says is taken, and tensors while the optimizer steps."""


def peak_of(measurement: Measurement, kind: str) -> float | None:
    """The published peak of one of `MEMORY_KINDS`, in bytes."""
    peak: float | None = getattr(measurement, f"{kind}_bytes")
    return peak


def every_rank(model: ModelSpec, table: LayoutTable) -> Ranks:
    """What every pipeline rank of each row holds, arrays of shape [n, k]; others hold nothing."""
    every = [all_ranks(*ranks_entry(model, table, row)) for row in range(len(table))]
    filled = np.zeros((len(FIELDS), len(table), max(len(ranks.count) for ranks in every)))
    for row, ranks in enumerate(every):
        for column, name in zip(filled, FIELDS, strict=True):
            column[row, : len(ranks.count)] = getattr(ranks, name)
    return Ranks(**dict(zip(FIELDS, filled, strict=True)))


def peaks(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, ranks: Ranks
) -> dict[str, Floats]:
    """Bytes of each of `MEMORY_KINDS` on every pipeline rank, [n, k].

    PyTorch counts neither the driver's context nor the buffers of communicators.

    Args:
        engine: with its constants for the device.
        ranks: as `every_rank` has them.
    """
    sizes = sizes_of(model, engine, *shapes_of(table))
    held = stage_memory(cluster, engine, table, sizes, ranks)
    device = total(held)
    reserved = device - held["context"] - held["communicators"] - held["margin"]
    return {
        "allocated": reserved - held["reserve"],
        "reserved": reserved,
        "device": device,
        "step": step_bytes(engine, table, sizes, ranks),
    }
