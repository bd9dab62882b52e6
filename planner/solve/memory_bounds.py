"""Lower bounds of the memory of layouts, and of the time to recompute activations that do not fit.

One pipeline rank stands for all: the one that keeps the most layers in flight. The fullest device holds at
least its share of the states, and the bytes that its layers keep from forward to backward. Where this exceeds
the memory, layers recompute; the best set of modules bounds the time for each freed byte.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.moments import least_gradient_share
from costmodels.memory.peak import least_states
from costmodels.memory.unit_sizes import row_unit_sizes, unit_sizes
from costmodels.ranks.rank_layers import ZERO, Ranks, all_ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Recompute, Schedule, even_split
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import FULL, SCHEDULES, Bools, Floats, Ints, LayoutTable, combined_key
from costmodels.time.unit_times import unit_passes
from planner.solve.recompute import recompute_sets, with_recompute

STEPS = 32
"""Number of equal parts of the bytes that recomputation can save; the least time of each part is computed."""

MANY = 1 << 20
"""More microbatches than any pipeline has ranks."""


@dataclass(frozen=True)
class FullestRank:
    """The pipeline rank that keeps the most layers in flight, of each row; arrays of [n]."""

    layers: Floats
    """Layers of the rank; those with experts, if the model has such layers."""
    in_flight: Floats
    """Most layers in flight: layers times the microbatches that each keeps."""
    flights: Floats
    """Most microbatches in flight, over all chunks."""
    running: Floats
    """Layers in their backward pass at that moment: 1, or the mean over ranks that are sure to have one."""
    states: Floats
    """Least bytes of the rank, without gradients and without activations kept for backward; in a step with
    one turn of microbatches (`costmodels.memory.moments.turn_of`)."""
    gradients: Floats
    """Least bytes of gradients after a backward pass, in the same step."""
    more_states: Floats
    """`states` of a step with more microbatches."""
    more_gradients: Floats
    has_buffer: Bools
    """True where gradients have a buffer from the start of a step."""

    @classmethod
    def empty(cls, rows: int) -> FullestRank:
        """Ranks that hold nothing."""
        columns: dict[str, Any] = {field.name: np.zeros(rows) for field in fields(cls)}
        return cls(**{**columns, "has_buffer": np.zeros(rows, dtype=np.bool_)})


def fullest_rank(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> FullestRank:
    """The fullest rank of each row with even stages.

    Stages of 1F1B need not stay even. For them it is a rank with the mean number of layers, and with the
    fewest layers in flight that any split has in the mean (`planner.solve.bounds.least_peak`).
    """
    key = combined_key([table.pipeline_parallel, table.virtual_pipeline_parallel, table.schedule])
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    found = [
        _layers_of_fullest(
            model,
            int(table.pipeline_parallel[row]),
            int(table.virtual_pipeline_parallel[row]),
            SCHEDULES[table.schedule[row]],
        )
        for row in first.tolist()
    ]
    layers, flying, flights, running = np.array(found, dtype=np.float64)[which].T
    # Nothing else of a step is sure to be there while most activations are.
    one = least_bytes(model, cluster, engine, table, layers)
    many = replace(table, global_batch_size=table.micro_batch_size * table.data_parallel * MANY)
    more_states, more_gradients = least_bytes(model, cluster, engine, many, layers)
    if engine.sharding.fully_sharded:
        # From the second turn on, all stages have gradients when the last turn goes backward.
        more_gradients = more_gradients / least_gradient_share(table)
    buffer = np.full(len(table), not engine.sharding.fully_sharded)
    return FullestRank(layers, flying, flights, running, *one, more_states, more_gradients, buffer)


def least_bytes(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, layers: Floats
) -> tuple[Floats, Floats]:
    """Least bytes of states and of gradients of a rank with some layers and without embedding and head, [n].

    Args:
        layers: layers of each row's rank; layers with experts, if the model has such layers.
    """
    own, other = ("moe", "dense") if model.routed_layers else ("dense", "moe")
    zero = np.zeros((len(table), 1))
    ranks = Ranks(
        count=np.ones((len(table), 1)),
        first=zero,
        last=zero,
        dense_plain=ZERO,
        moe_plain=ZERO,
        dense_plain_in_flight=ZERO,
        moe_plain_in_flight=ZERO,
        backlog=ZERO,
        place=ZERO,
        **{own: layers[:, None], other: zero, f"{own}_in_flight": zero, f"{other}_in_flight": zero},
    )
    engine = engine.for_device(cluster.device)
    sizes = row_unit_sizes(model, engine, *distinct_shapes(table))
    states, gradients = (
        np.broadcast_to(each, zero.shape)[:, 0] for each in least_states(cluster, engine, table, sizes, ranks)
    )
    return states, gradients


def _layers_of_fullest(
    model: ModelSpec, pipeline: int, chunks: int, schedule: Schedule
) -> tuple[float, float, float, float]:
    """`FullestRank.layers`, `in_flight`, `flights` and `running` of one pipeline."""
    # Layers of a model with experts that have none are left out.
    layers, leading = model.routed_layers or model.layers, model.leading_layers
    if chunks == 1:
        alone = min(pipeline, layers)
        flying = (alone * (alone + 1) / 2 + (layers - alone)) / pipeline
        return layers / pipeline, flying, float(pipeline), alone / pipeline
    ranks = all_ranks(even_split(model.layers, pipeline * chunks), pipeline, leading, schedule)
    if model.routed_layers:
        own, often = ranks.moe, ranks.moe_in_flight
    else:
        own, often = ranks.dense, ranks.dense_in_flight
    fullest = int(often.argmax())
    every = (ranks.dense_in_flight + ranks.moe_in_flight)[fullest] / (ranks.dense + ranks.moe)[fullest]
    return float(own[fullest]), float(often[fullest]), chunks * float(every), float(own[fullest] >= 1)


def kept_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes that a layer keeps from forward to backward for one microbatch, [n]."""
    return _layer_bytes(model, engine, table)[0]


@dataclass(frozen=True)
class Recomputation:
    """Bounds for the recomputation of one layer, for each sequence of a microbatch."""

    freed: Floats
    """The most bytes that recomputation saves, [n]."""
    seconds: Floats
    """The least seconds to save each `STEPS`-th of these bytes, [n, `STEPS` + 1]."""
    working: Floats
    """The least bytes that the backward pass needs besides kept ones, with any recomputation, [n]."""
    busy: Floats
    """The least sum of kept bytes and bytes of the backward pass, with any recomputation, [n]."""

    @classmethod
    def of_nothing(cls, *shape: int) -> Recomputation:
        """Bounds of layers that keep nothing; arrays of `shape` instead of [n]."""
        none = np.zeros(shape)
        return cls(none, np.zeros((*shape, STEPS + 1)), none, none)

    def loosest(self, shape: tuple[int, int, int]) -> Recomputation:
        """The bounds that hold for all sizes of microbatches; arrays of [shapes, splits] instead of [n].

        Args:
            shape: lengths of the axes of [n]: shapes, sizes and splits.
        """

        def least(array: Floats) -> Floats:
            found: Floats = array.reshape(*shape, *array.shape[1:]).min(axis=1)
            return found

        freed = -least(-self.freed)
        return Recomputation(freed, least(self.seconds), least(self.working), least(self.busy))

    def take(self, rows: Ints) -> Recomputation:
        """The bounds of some rows."""
        return Recomputation(**{name: held[rows] for name, held in vars(self).items()})


def recomputation_of_layer(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, kinds: Collection[Recompute]
) -> Recomputation:
    """Bounds for the recomputation of one layer of each row.

    Layers may recompute different modules, so their mean time lies on or above the lower convex hull of all
    sets of modules.

    Args:
        table: rows that recompute nothing.
    """
    engine = engine.for_device(cluster.device)
    split = table.runs(*SPLIT_BACKWARD)
    before = _layer_seconds(model, cluster, engine, table)
    held, working = _layer_bytes(model, engine, table)
    none = np.zeros(len(table))
    freed, longer, busy = [none], [none], held + working
    for kind, modules in recompute_sets(model, engine, kinds):
        other = with_recompute(table, kind, modules)
        able = ~(split & (kind == FULL))
        kept, again = _layer_bytes(model, engine, other)
        freed.append(np.where(able, np.maximum(held - kept, 0.0), 0.0))
        longer.append(
            np.where(able, np.maximum(_layer_seconds(model, cluster, engine, other) - before, 0.0), 0.0)
        )
        working = np.where(able, np.minimum(working, again), working)
        busy = np.where(able, np.minimum(busy, kept + again), busy)
    x, y = np.stack(freed) / table.micro_batch_size, np.stack(longer) / table.micro_batch_size
    most = x.max(axis=0)
    steps = np.linspace(0.0, 1.0, STEPS + 1)[:, None] * most
    hull = np.zeros_like(steps)
    for one, other_one in combinations(range(len(x)), 2):
        across = x[other_one] - x[one]
        slope = np.where(across == 0, 0.0, (y[other_one] - y[one]) / np.where(across == 0, 1.0, across))
        slope = np.maximum(slope, 0.0)
        # The line of that slope that lies below all sets.
        hull = np.maximum(hull, slope * steps + (y - slope * x).min(axis=0))
    return Recomputation(most, hull.T, working / table.micro_batch_size, busy / table.micro_batch_size)


def _layer_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> tuple[Floats, Floats]:
    """Bytes of one layer and microbatch: kept from forward to backward, and further ones in backward, [n]."""
    sizes = unit_sizes(model, engine, table)
    if model.routed_layers:
        return sizes.moe_activations, sizes.moe_recomputation
    return sizes.dense_activations, sizes.dense_recomputation


def _layer_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    units = unit_passes(model, cluster, engine, table)
    seconds: Floats = units["moe" if model.routed_layers else "dense"].total
    return seconds
