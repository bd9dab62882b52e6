"""Layouts that fit into the memory of a device."""

from __future__ import annotations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import least_state_bytes
from costmodels.memory.unit_sizes import row_unit_sizes
from costmodels.pricing import peak_memory
from costmodels.ranks.rank_layers import critical_ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from planner.solve.bounds import first_rows
from planner.space.grid import Space


@dataclass(frozen=True)
class Fit:
    """The rows that fit into the memory of a device; arrays of shape [n]."""

    rows: Bools
    """Rows that fit."""
    states: Bools
    """Rows whose parameters, gradients and optimizer states alone would fit on every pipeline rank."""
    mean: Bools
    """Rows whose states would fit if they were equal on all pipeline ranks."""
    peaks: Floats
    """Bytes of the fullest device; infinite for rows that do not fit with any recomputation."""

    def take(self, rows: Ints) -> Fit:
        """Some of the rows."""
        return Fit(self.rows[rows], self.states[rows], self.mean[rows], self.peaks[rows])


def fit(model: ModelSpec, cluster: Cluster, engine: Engine, space: Space, known: Floats | None = None) -> Fit:
    """The rows that fit, and the rows that could fit with fewer activations.

    Args:
        known: `Fit.peaks` of the same rows on devices with another memory, or on other links.
    """
    table = space.table
    possible, mean = states_that_fit(model, cluster, engine, space)
    rows = np.flatnonzero(possible)
    peaks = np.full(len(table), np.inf)
    if known is not None:
        peaks[rows] = known[rows]
        rows = rows[np.isinf(known[rows])]
    peaks[rows] = peak_memory(model, cluster, engine, table, rows)
    return Fit(peaks <= cluster.memory_bytes, possible, mean, peaks)


def states_that_fit(model: ModelSpec, cluster: Cluster, engine: Engine, space: Space) -> tuple[Bools, Bools]:
    """`Fit.states` and `Fit.mean` of each row of a space."""
    first, some = first_rows(space.states)
    highest, mean = _state_bytes(model, cluster, engine, space.table.take(first[some]))
    within, within_mean = np.zeros((2, len(first)), dtype=np.bool_)
    within[some], within_mean[some] = highest <= cluster.memory_bytes, mean <= cluster.memory_bytes
    return within[space.states], within_mean[space.states]


def _state_bytes(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[Floats, Floats]:
    """Bytes of states and of constant allocations: of the fullest pipeline rank, and the mean, [n]."""
    engine = engine.for_device(cluster.device)
    shapes, shape = distinct_shapes(table)
    ranks, _ = critical_ranks(model, table)
    sizes = row_unit_sizes(model, engine, shapes, shape)
    states = least_state_bytes(cluster, engine, table, sizes, ranks)
    mean: Floats = (states * ranks.count).sum(axis=1) / ranks.count.sum(axis=1)
    return states.max(axis=1), mean
