"""Lower bounds of the memory of layouts, and of the time to recompute activations that do not fit.

One pipeline rank stands for all: the one that keeps the most layers in flight. The fullest device holds at
least its share of the states, and the bytes that its layers keep from forward to backward. Where this exceeds
the memory, layers recompute; the best set of modules bounds the time for each freed byte.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import least_states
from costmodels.memory.unit_sizes import row_unit_sizes, unit_sizes
from costmodels.ranks.rank_layers import ZERO, Ranks, all_ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Recompute, even_split
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import FULL, SCHEDULES, Bools, Floats, LayoutTable, combined_key
from costmodels.time.unit_times import unit_passes
from planner.solve.recompute import recompute_sets, with_recompute

STEPS = 32
"""Number of equal parts of the bytes that recomputation can save; the least time of each part is computed."""


@dataclass(frozen=True)
class FullestRank:
    """The pipeline rank that keeps the most layers in flight, of each row; arrays of [n]."""

    layers: Floats
    in_flight: Floats
    """Most layers in flight: layers times the microbatches that each keeps."""
    states: Floats
    """Least bytes of the rank, without gradients and without activations kept for backward."""
    gradients: Floats
    """Least bytes of gradients after a backward pass."""
    has_buffer: Bools
    """True where gradients have a buffer from the start of a step."""


def fullest_rank(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> FullestRank:
    """The fullest rank of each row with even stages.

    Stages of 1F1B need not stay even. For them it is a rank with the mean number of layers, and with the
    fewest layers in flight that any split has in the mean (`planner.solve.bounds.least_peak`).
    """
    pipeline, chunks = table.pipeline_parallel, table.virtual_pipeline_parallel
    key = combined_key([pipeline, chunks, table.schedule])
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    found = [
        _layers_in_flight(model.layers, int(pipeline[row]), int(chunks[row]), int(table.schedule[row]))
        for row in first.tolist()
    ]
    layers, flying = (np.array(each, dtype=np.float64)[which] for each in zip(*found, strict=True))
    own, other = ("moe", "dense") if model.routed_layers else ("dense", "moe")
    # Of leading layers of another kind, as many as there are may lie on this rank.
    fewer = model.leading_layers if model.routed_layers else 0
    share = np.maximum(layers - fewer, 0.0) / layers
    held, zero = (layers * share)[:, None], np.zeros((len(table), 1))
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
        **{own: held, other: zero, f"{own}_in_flight": zero, f"{other}_in_flight": zero},
    )
    engine = engine.for_device(cluster.device)
    sizes = row_unit_sizes(model, engine, *distinct_shapes(table))
    # Nothing else of a step is sure to be there while most activations are.
    states, gradients = (
        np.broadcast_to(each, held.shape)[:, 0] for each in least_states(cluster, engine, table, sizes, ranks)
    )
    buffer = np.full(len(table), not engine.sharding.fully_sharded)
    return FullestRank(layers, flying * share, states, gradients, buffer)


def _layers_in_flight(layers: int, pipeline: int, chunks: int, schedule: int) -> tuple[float, float]:
    """Layers of the rank that keeps the most, and its layers in flight."""
    if chunks == 1:
        alone = min(pipeline, layers)
        return layers / pipeline, (alone * (alone + 1) / 2 + (layers - alone)) / pipeline
    ranks = all_ranks(even_split(layers, pipeline * chunks), pipeline, layers, SCHEDULES[schedule])
    fullest = int(ranks.dense_in_flight.argmax())
    return float(ranks.dense[fullest]), float(ranks.dense_in_flight[fullest])


def kept_bytes(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes that a layer keeps from forward to backward for one microbatch, [n]."""
    sizes = unit_sizes(model, engine, table)
    kept: Floats = sizes.moe_activations if model.routed_layers else sizes.dense_activations
    return kept


def least_recompute_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, kinds: Collection[Recompute]
) -> tuple[Floats, Floats]:
    """The most bytes that recomputation saves in a layer for each sequence, [n], and the least seconds to
    save each `STEPS`-th of them, [n, `STEPS` + 1].

    Layers may recompute different modules, so their mean lies on or above the lower convex hull of all sets
    of modules.

    Args:
        table: rows that recompute nothing.
    """
    engine = engine.for_device(cluster.device)
    split = table.runs(*SPLIT_BACKWARD)
    before, held = _layer_seconds(model, cluster, engine, table), kept_bytes(model, engine, table)
    none = np.zeros(len(table))
    freed, longer = [none], [none]
    for kind, modules in recompute_sets(model, engine, kinds):
        other = with_recompute(table, kind, modules)
        able = ~(split & (kind == FULL))
        freed.append(np.where(able, np.maximum(held - kept_bytes(model, engine, other), 0.0), 0.0))
        longer.append(
            np.where(able, np.maximum(_layer_seconds(model, cluster, engine, other) - before, 0.0), 0.0)
        )
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
    return most, hull.T


def _layer_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    units = unit_passes(model, cluster, engine, table)
    seconds: Floats = units["moe" if model.routed_layers else "dense"].total
    return seconds
