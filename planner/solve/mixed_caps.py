"""The largest number of layers that fits each pipeline rank on nodes of two kinds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.rank_costs import RankCosts
from costmodels.ranks.rank_layers import FIELDS, Ranks, all_ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import SCHEDULES, Floats, Ints, LayoutTable, distinct_rows
from planner.solve.bisection import most_within
from planner.solve.mixed_splits import SLACK, Pipelines


def _held(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, some: Pipelines
) -> Callable[[Ints], Floats]:
    """A function that returns the bytes of each rank, [n, ranks], for a number of layers spread evenly over
    its chunks."""
    alike, code = distinct_rows([table.pipeline_parallel, table.virtual_pipeline_parallel, table.schedule])
    filled = np.zeros((len(FIELDS), len(alike), some.kind.shape[1]))
    for index, row in enumerate(alike.tolist()):
        pipeline, chunks = int(table.pipeline_parallel[row]), int(table.virtual_pipeline_parallel[row])
        one = (1,) * (pipeline * chunks)
        leading = 0 if model.routed_layers else len(one)
        every = all_ranks(one, pipeline, leading, SCHEDULES[int(table.schedule[row])])
        filled[:, index, :pipeline] = [getattr(every, name) for name in FIELDS]
    single = Ranks(**dict(zip(FIELDS, filled[:, code], strict=True)))
    empty = RankCosts(model, cluster, engine, table, single, some.kind)

    def held(count: Ints) -> Floats:
        layers = count / table.virtual_pipeline_parallel[:, None]
        counts = {
            name: array if name in ("count", "first", "last", "place") or not array.any() else array * layers
            for name, array in vars(single).items()
        }
        return empty.with_ranks(Ranks(**counts)).bytes

    return held


def caps_of_ranks(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, some: Pipelines
) -> Ints:
    """Upper bound of the layers of each rank that fit into its memory, [n, ranks].

    Bytes are sums and maxima of terms proportional to layers, except for buffers of two layers. So each
    further layer takes at least as much as the third one. Chunks that differ by a layer may hold less than
    equal chunks.
    """
    held = _held(model, cluster, engine, table, some)
    chunks = np.broadcast_to(some.chunks[:, None], some.kind.shape)
    one, two, three = (held(count * chunks) for count in (1, 2, 3))
    limit = cluster.memory_bytes
    each = np.maximum(three - two, 1.0) / chunks
    more = np.floor(np.maximum(limit - two, 0.0) / each * (1 + SLACK))
    caps = np.where(two <= limit, 2 * chunks + more, np.where(one <= limit, 2 * chunks - 1, 0))
    most: Ints = np.minimum(caps + chunks - 1, some.layers[:, None]).astype(np.int64)
    return most


def exact_caps(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, some: Pipelines, most: Ints
) -> Ints:
    """The most layers of each rank that fit into its memory in equal chunks, [n, ranks], at most `most`."""
    held = _held(model, cluster, engine, table, some)
    return most_within(held, cluster.memory_bytes, np.zeros_like(most), most)
