"""Bytes on a device of each pipeline rank, as `costmodels.memory` gives them for other engines."""

from __future__ import annotations

from costmodels.bundled.rank_memory import rank_peaks
from costmodels.bundled.replay import KINDS
from costmodels.memory.peak import dynamic_bytes, margin_bytes
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable


def stage_memory(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, compiled: bool = False
) -> dict[str, Floats]:
    """Bytes on a device of each pipeline rank at the peak: the fields of `StageMemory`.

    Arrays of shape [n, k], or such that broadcast to it, for k pipeline ranks; 0 tensors for ranks that a row
    does not have.

    Args:
        table: rows that `covers`.
        compiled: layers are compiled.
    """
    _, compositions = rank_peaks(model, table, compiled)
    parts = dict(zip(KINDS, compositions, strict=True))
    lost = engine.allocator.fragmentation * dynamic_bytes(parts)
    return parts | margin_bytes(cluster, engine, table, lost, model.experts > 0)
