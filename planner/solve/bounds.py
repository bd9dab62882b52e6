"""What no layout can beat: lower bounds of time and memory, so that only a few rows are solved and priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import row_unit_sizes
from costmodels.pricing import peak_memory
from costmodels.ranks.rank_layers import ZERO, Ranks, critical_ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.row_blocks import block_results
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from costmodels.time.unit_times import unit_passes
from planner.space.grid_table import Places

Worth = Callable[[LayoutTable, Floats], Bools]
"""Whether rows that take so many seconds would be among the first of the ranking."""


def least_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Seconds that a step of each row takes at least, whatever the layers of its stages, [n].

    A step takes no less than its slowest pipeline rank computes, and that no less than their mean: what one
    micro batch takes on all stages together, over pp, for each micro batch; and `least_step` more in 1F1B.
    Layers that recompute in a part of a stage only count as if they recomputed nothing.
    """
    shapes, shape = distinct_shapes(table)
    units = unit_passes(model, cluster, engine.for_device(cluster.device), shapes)
    count = {"dense": model.layers - model.moe_layers, "moe": model.moe_layers, "first": 1, "last": 1}
    whole = np.zeros(len(shapes))
    for kind, number in count.items():
        if number:
            whole += number * units.get(f"{kind}_plain", units[kind]).total
    mean = whole[shape] / table.pipeline_parallel
    return np.where(table.runs("1f1b"), least_step(table, whole[shape], mean), mean * table.micro_batches)


def rows_worth(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, rows: Ints, worth: Worth
) -> Ints:
    """The rows of `rows` that could be worth it, whatever the layers of their stages."""

    if not len(rows):
        return rows

    def could_be(some: LayoutTable) -> Bools:
        return worth(some, least_seconds(model, cluster, engine, some))

    found: Ints = rows[np.concatenate([*block_results(could_be, table, rows)])]
    return found


def least_step(table: LayoutTable, whole: Floats, slowest: Floats) -> Floats:
    """Seconds that a step of 1F1B takes at least, [n].

    With B for the slowest rank, S for all ranks, W ranks behind the slowest one and A for what these take,
    the closed form (`costmodels.time.bubble.uneven_bubble_seconds`) has a bubble of at least
    (S - B - A) + max(2 A - W B, 0), which is least for A = W B / 2, and that for W = pp - 1.

    Args:
        whole: S, seconds of one micro batch on all ranks together, [n].
        slowest: B, seconds of one micro batch on the slowest rank, or less, [n].
    """
    half = (table.pipeline_parallel - 1) / 2
    least: Floats = whole + (table.micro_batches - 1 - half) * slowest
    return least


def least_peak(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes that the fullest device of each 1F1B row holds at least, whatever the layers of its stages, [n].

    Bytes are sums and maxima of what grows in proportion to what a stage holds, so that the fullest stage
    holds no less than one with the mean of all would. Stage s of pp keeps pp - s micro batches of each layer,
    which is least if all but one layer of each stage are on the last one. Leading dense layers of a model
    with experts are left out.
    """
    engine = engine.for_device(cluster.device)
    shapes, shape = distinct_shapes(table)
    pipeline = table.pipeline_parallel.astype(np.float64)[:, None]
    layers = model.moe_layers or model.layers
    held = layers / pipeline
    # Of stages without such a layer, the first ones may have none of them.
    alone = np.minimum(pipeline, layers)
    flying = (alone * (alone + 1) / 2 + (layers - alone)) / pipeline
    own, other = ("moe", "dense") if model.moe_layers else ("dense", "moe")
    zero = np.zeros_like(held)
    ranks = Ranks(
        count=np.ones_like(held),
        first=1 / pipeline,
        last=1 / pipeline,
        dense_plain=ZERO,
        moe_plain=ZERO,
        dense_plain_in_flight=ZERO,
        moe_plain_in_flight=ZERO,
        backlog=ZERO,
        **{own: held, other: zero, f"{own}_in_flight": flying, f"{other}_in_flight": zero},
    )
    sizes = row_unit_sizes(model, engine, shapes, shape)
    bytes_held: Floats = sum(stage_memory(cluster, engine, table, sizes, ranks).values(), np.zeros(()))
    return bytes_held[:, 0]


@dataclass(frozen=True)
class Fit:
    """The rows that fit into the memory of a device; arrays of shape [n]."""

    rows: Bools
    """Rows that do."""
    states: Bools
    """Rows whose parameters, gradients and optimizer states alone would, on every pipeline rank."""
    mean: Bools
    """Rows whose states would if all pipeline ranks had as many."""


def fit(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, states: Places) -> Fit:
    """The rows that fit, and those of the others that could with fewer activations.

    Args:
        states: number of each row, the same for rows that hold the same states (`planner.space.grid.Space`).
    """
    first = np.full(int(states.max(initial=-1)) + 1, -1)
    first[states[::-1]] = np.arange(len(table), dtype=np.int32)[::-1]
    some = first >= 0
    highest, mean = _state_bytes(model, cluster, engine, table.take(first[some]))
    within, within_mean = np.zeros((2, len(first)), dtype=np.bool_)
    within[some], within_mean[some] = highest <= cluster.memory_bytes, mean <= cluster.memory_bytes
    possible = within[states]
    fits = possible.copy()
    rows = np.flatnonzero(possible)
    fits[rows] = peak_memory(model, cluster, engine, table, rows) <= cluster.memory_bytes
    return Fit(fits, possible, within_mean[states])


STATES = ("parameters", "gradients", "optimizer", "context", "communicators", "margin")
"""Parts of `StageMemory` that do not depend on the size of a micro batch and on what is recomputed."""


def _state_bytes(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[Floats, Floats]:
    """Bytes of states and what the device holds anyway: the most of a pipeline rank, and their mean, [n]."""
    engine = engine.for_device(cluster.device)
    shapes, shape = distinct_shapes(table)
    ranks, _ = critical_ranks(model, table)
    held = stage_memory(cluster, engine, table, row_unit_sizes(model, engine, shapes, shape), ranks)
    states = sum((held[part] for part in STATES), np.zeros(()))
    mean: Floats = (states * ranks.count).sum(axis=1) / ranks.count.sum(axis=1)
    return states.max(axis=1), mean
