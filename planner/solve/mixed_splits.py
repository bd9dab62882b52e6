"""Layers of each pipeline rank on nodes of two kinds: the fast kind gets more, as far as memory allows.

The result is the number of layers of each rank, which its chunks share evenly. Given a bound on a rank's
seconds, each rank takes as many layers as the bound and its memory allow. The bound can be met if and only if
these are enough. Bisection finds the least bound. That bound is tried, and the next ones that give some rank
one more layer. With few microbatches it pays to give the fast kind more than an equal load, as every
microbatch passes through all ranks. Within a bound there are two ways to fill. Either the faster kind takes
all that it can and the slower one the rest, both evenly. Or the first ranks take all that they can, as their
forward passes of further microbatches overlap with the first microbatch behind them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.rank_costs import unit_seconds
from costmodels.ranks.sites import MIXED, rank_kinds
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import V_SCHEDULES
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable, distinct_numbers, numbered_splits
from planner.solve.bisection import fewest_enough, least_number

NEXT = 3
"""Number of bounds above the least one that are tried for each kind of rank."""

BEST = 3
"""Most bounds, with one way to fill each, whose layers are kept."""

SLACK = 1e-9
"""Relative rounding error that sums of seconds may have."""

FORWARD = 1 / 3
"""Share of a microbatch's seconds in forward; backward has two GEMMs for each GEMM of forward."""


@dataclass(frozen=True)
class Pipelines:
    """Seconds of the ranks of rows; arrays of [n, ranks] or [n]."""

    layers: Ints
    there: Bools
    """Mask of the ranks that the row has."""
    kind: Ints
    fixed: Floats
    """Seconds of a microbatch on a rank without layers: of the embedding or of the head."""
    each: Floats
    """Seconds of a layer."""
    micro_batches: Ints
    chunks: Ints

    def take(self, rows: Ints) -> Pipelines:
        """Some of the rows."""
        return Pipelines(**{name: held[rows] for name, held in vars(self).items()})

    def most(self, bound: Floats, caps: Ints) -> Ints:
        """Layers of each rank within a bound on its seconds, [n, ranks]."""
        room = (bound[:, None] - self.fixed) * (1 + SLACK) / self.each
        count = np.minimum(np.floor(np.maximum(room, 0.0)).astype(np.int64), caps)
        return np.where(self.there, count, 0)

    def reaches(self, count: Ints) -> Bools:
        """Return whether these layers of ranks are enough for the model, with no empty chunk, [n]."""
        each = (count >= self.chunks[:, None]) | ~self.there
        full: Bools = (count.sum(axis=1) >= self.layers) & each.all(axis=1)
        return full

    def seconds(self, count: Ints) -> Floats:
        """Seconds of a microbatch on each rank, [n, ranks]."""
        return np.where(self.there, self.fixed + count * self.each, 0.0)


def pipelines(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Pipelines:
    """The seconds of the ranks of each row; leading dense layers count as if all were on the first rank.

    Args:
        engine: engine with its constants for all devices.
        table: rows whose layers recompute alike.
    """
    units = unit_seconds(model, cluster, engine, table)
    ranks = int(table.pipeline_parallel.max(initial=1))
    kind, there = _kinds(cluster, table, ranks)
    rows = np.arange(len(table))[:, None]
    usual = units[:, :, 1] if model.routed_layers else units[:, :, 0]
    leading = model.leading_layers if model.routed_layers else 0
    ahead = leading * (units[:, :, 0] - usual) + units[:, :, 2]
    place = np.arange(ranks)[None, :]
    last = np.where(table.runs(*V_SCHEDULES), 0, table.pipeline_parallel - 1)[:, None]
    fixed = (place == 0) * ahead[rows, kind] + (place == last) * units[:, :, 3][rows, kind]
    return Pipelines(
        layers=np.full(len(table), model.layers),
        there=there,
        kind=kind,
        fixed=fixed,
        each=usual[rows, kind],
        micro_batches=table.micro_batches,
        chunks=table.virtual_pipeline_parallel,
    )


def _kinds(cluster: Cluster, table: LayoutTable, ranks: int) -> tuple[Ints, Bools]:
    """Kind of each pipeline rank, [n, ranks], and a mask of the ranks that rows have."""
    kind = np.zeros((len(table), ranks), dtype=np.int64)
    for pipeline in distinct_numbers(table.pipeline_parallel):
        some = table.pipeline_parallel == pipeline
        kinds = rank_kinds(cluster, pipeline)
        kind[some, :pipeline], kind[some, pipeline:] = kinds, kinds[-1]
    return kind, np.arange(ranks)[None, :] < table.pipeline_parallel[:, None]


def least_bound(some: Pipelines, caps: Ints | None = None) -> Floats:
    """The least seconds of a microbatch on the slowest rank, [n]; infinite where no layers fit `caps`."""
    limits = np.broadcast_to(some.layers[:, None], some.kind.shape) if caps is None else caps
    low = np.where(some.there, some.fixed + some.chunks[:, None] * some.each, 0.0).max(axis=1)
    high = np.where(some.there, some.fixed + some.layers[:, None] * some.each, 0.0).max(axis=1)
    possible = some.reaches(some.most(high, limits))
    met = some.reaches(some.most(low, limits))
    high = np.where(met, low, high)
    least = least_number(lambda bound: some.reaches(some.most(bound, limits)), low, high, close=1e-8)
    return np.where(possible, least, np.inf)


def layers_of_ranks(
    some: Pipelines, least: Floats, caps: Ints | None = None, best: int = BEST
) -> tuple[Ints, Ints]:
    """The layers of each rank, [found, ranks], and the row that each result belongs to.

    Args:
        least: `least_bound`, finite.
        best: most bounds whose layers are kept.
    """
    limits = np.broadcast_to(some.layers[:, None], some.kind.shape) if caps is None else caps
    once = _bounds(some, least)
    filled = [_filled(some, bound, limits, in_front) for bound in once.T for in_front in (False, True)]
    bounds = np.repeat(once, 2, axis=1)
    chosen = np.stack(filled, axis=1)
    took = np.stack([_took(some, count) for count in filled], axis=1)
    order = took.argsort(axis=1, kind="stable")
    # Bounds that differ may allow the same layers, which take the same.
    gain = np.diff(np.take_along_axis(took, order, axis=1), axis=1, prepend=0.0)
    again = gain <= SLACK * took.min(axis=1)[:, None]
    order = np.take_along_axis(order, again.argsort(axis=1, kind="stable"), axis=1)[:, :best]
    row = np.repeat(np.arange(len(least)), order.shape[1])
    counts = np.take_along_axis(chosen, order[:, :, None], axis=1).reshape(-1, some.kind.shape[1])
    part = some.take(row)
    limit = part.most(np.take_along_axis(bounds, order, axis=1).reshape(-1), limits[row])
    both = [_evened(part, counts, limit, front) for front in (False, True)]
    return np.concatenate([*both, counts]), np.concatenate([row] * 3)


def _took(some: Pipelines, count: Ints) -> Floats:
    """Seconds of a step with the given layers on each rank, [n].

    The slowest rank works on all microbatches without a pause. Before and after that, the first microbatch
    passes through the other ranks, a chunk at a time. While it is behind that rank, the rank waits once it
    has no further forward pass.
    """
    seconds = some.seconds(count)
    chunks = some.chunks[:, None]
    through = np.cumsum(seconds, axis=1)
    before, behind = through - seconds, through[:, -1:] - through
    ranks_behind = np.cumsum(some.there[:, ::-1], axis=1)[:, ::-1] - 1
    waits = np.maximum(behind - FORWARD * ranks_behind * seconds, 0.0)
    rank = some.micro_batches[:, None] * seconds + (before + waits) / chunks
    took: Floats = np.where(some.there, rank, 0.0).max(axis=1)
    return took


def equal_chunks(some: Pipelines, caps: Ints | None, best: int) -> tuple[Ints, Ints]:
    """`layers_of_ranks` in which all chunks of a rank have the same number of layers.

    Args:
        some: rows whose chunks divide the layers.
    """
    chunks = some.chunks[:, None]
    alike = replace(
        some,
        layers=some.layers // some.chunks,
        each=some.each * chunks,
        chunks=np.ones_like(some.chunks),
    )
    limits = None if caps is None else caps // chunks
    least = least_bound(alike, limits)
    rows = np.flatnonzero(np.isfinite(least))
    found, row = layers_of_ranks(
        alike.take(rows), least[rows], None if limits is None else limits[rows], best
    )
    return found * chunks[rows][row], rows[row]


def _bounds(some: Pipelines, least: Floats) -> Floats:
    """Bounds on the seconds of a rank, [n, bounds]: the least one, and the next ones that give some rank more
    layers."""
    found = [least]
    for rank in _representatives(some):
        rows = np.arange(len(least))
        fixed, each = some.fixed[rows, rank], some.each[rows, rank]
        count = np.floor((least - fixed) * (1 + SLACK) / each)
        found += [np.maximum(fixed + (count + more) * each, least) for more in range(1, NEXT + 1)]
    return np.stack(found, axis=1)


def _representatives(some: Pipelines) -> list[Ints]:
    """One rank of each sort: the first, the last, and the last one of each kind, [n] each."""
    ranks = some.there.sum(axis=1)
    found = [np.zeros_like(ranks), ranks - 1]
    for kind in range(MIXED + 1):
        own = some.there & (some.kind == kind)
        middle = own.shape[1] - 1 - own[:, ::-1].argmax(axis=1)
        found.append(np.where(own.any(axis=1), np.maximum(middle - (middle == ranks - 1), 0), 0))
    return found


def _filled(some: Pipelines, bound: Floats, caps: Ints, in_front: bool) -> Ints:
    """Most layers of ranks within a bound, [n, ranks], filled from the first ranks or from the fastest ones.

    Each chunk has at least one.
    """
    limit, fewest = some.most(bound, caps), np.where(some.there, some.chunks[:, None], 0)
    first = np.zeros_like(some.each) if in_front else some.each
    order = np.where(some.there, first, np.inf).argsort(axis=1, kind="stable")
    spare = np.take_along_axis(np.maximum(limit - fewest, 0), order, axis=1)
    left = np.maximum(some.layers - fewest.sum(axis=1), 0)[:, None]
    before = np.cumsum(spare, axis=1) - spare
    taken = np.clip(left - before, 0, spare)
    count = np.zeros_like(limit)
    np.put_along_axis(count, order, taken, axis=1)
    return count + fewest


def _evened(some: Pipelines, count: Ints, limit: Ints, front: bool) -> Ints:
    """`count` with the layers of each kind spread evenly over its ranks, none above `limit`.

    If a kind's layers do not divide evenly, either its first or its last ranks have one less.
    """
    result: Ints = count.copy()
    for kind in range(MIXED + 1):
        own = some.there & (some.kind == kind)
        wanted = (count * own).sum(axis=1)
        within = np.where(own, limit, 0)

        def enough(level: Ints, within: Ints = within, wanted: Ints = wanted) -> Bools:
            held: Ints = np.minimum(within, level[:, None]).sum(axis=1)
            return held >= wanted

        height = fewest_enough(enough, np.zeros_like(wanted), within.max(axis=1))
        level = np.minimum(within, height[:, None])
        surplus = (level.sum(axis=1) - wanted)[:, None]
        largest = own & (level == height[:, None])
        rank = np.cumsum(largest, axis=1) if front else np.cumsum(largest[:, ::-1], axis=1)[:, ::-1]
        result = np.where(own, level - (largest & (rank <= surplus)), result)
    return result


def with_layers(table: LayoutTable, row: Ints, layers: Ints) -> LayoutTable:
    """Rows of a table with changed numbers of layers on their ranks.

    Args:
        row: index in the table of each row of the result.
        layers: layers of each rank, [results, ranks]; 0 for ranks that a row does not have.
    """
    part = table.take(row)
    in_v = part.runs(*V_SCHEDULES).tolist()
    sizes = zip(part.pipeline_parallel.tolist(), part.virtual_pipeline_parallel.tolist(), in_v, strict=True)
    words = [
        _stages(tuple(counts[:pipeline]), chunks, v)
        for counts, (pipeline, chunks, v) in zip(layers.tolist(), sizes, strict=True)
    ]
    splits, places = numbered_splits(words)
    return replace(part, split=places, splits=splits)


def _stages(layers: tuple[int, ...], chunks: int, in_v: bool) -> tuple[int, ...]:
    """Layers of each stage, from the layers of each rank.

    If a rank's layers do not divide evenly into its chunks, ranks with more layers have the larger chunks
    first, the other ranks last. So each round of chunks has about the same number of layers.
    """
    mean = sum(layers) / len(layers)
    rounds = []
    for chunk in range(chunks):
        late = chunks - 1 - chunk
        rounds.append([(own + (late if own > mean else chunk)) // chunks for own in layers])
    if in_v:
        rounds[1].reverse()
    return tuple(count for each in rounds for count in each)
