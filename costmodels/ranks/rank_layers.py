"""The layers of pipeline ranks, and the microbatches that each rank keeps in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.ranks.sites import rank_kinds
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES, Schedule
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import (
    NONE,
    RECOMPUTE_KINDS,
    RECOMPUTE_METHODS,
    SCHEDULES,
    Floats,
    Ints,
    LayoutTable,
    distinct_rows,
)


@dataclass(frozen=True)
class Ranks:
    """Pipeline ranks; arrays of one shape, [pp] for one layout or [n, k] for a table.

    In a table, k covers the ranks that can be slowest or fullest; equal ones share an entry.
    """

    count: Floats
    """Number of pipeline ranks that the entry represents; 0 for an entry that differs only in its
    microbatches in flight."""
    dense: Floats
    """Number of layers with a dense MLP, over all chunks."""
    moe: Floats
    """Number of layers with experts."""
    dense_plain: Floats
    """Number of further layers with a dense MLP and without recomputation, where the first layers of a stage
    recompute."""
    moe_plain: Floats
    first: Floats
    """1 for a rank with the embedding, else 0."""
    last: Floats
    """1 for a rank with head and loss, else 0."""
    dense_in_flight: Floats
    """Dense layers in flight at most, times the microbatches of each, in a step of many microbatches; layers
    that share one kept input count as one."""
    moe_in_flight: Floats
    dense_plain_in_flight: Floats
    moe_plain_in_flight: Floats
    backlog: Floats
    """Layers that wait for their weight gradients, counted like `dense_in_flight`."""
    place: Floats
    """The place in the pipeline, from 1; for an entry of equal ranks, the place of the fullest; 0 for no
    particular place."""

    @property
    def layers(self) -> Floats:
        """Layers of each rank."""
        return _sum(self.all_dense, self.all_moe)

    @property
    def all_dense(self) -> Floats:
        """Layers with a dense MLP, whether they recompute or not."""
        return _sum(self.dense, self.dense_plain)

    @property
    def all_moe(self) -> Floats:
        """Layers with experts, whether they recompute or not."""
        return _sum(self.moe, self.moe_plain)

    def each(self, change: Callable[[Floats], Floats]) -> Ranks:
        """The ranks with `change` applied to every field, except fields that are `ZERO`."""
        held = {field.name: getattr(self, field.name) for field in fields(Ranks)}
        return Ranks(**{name: array if array is ZERO else change(array) for name, array in held.items()})


ZERO: Floats = np.zeros((1, 1))
"""The stand-in for a field that is zero on every rank, such as the experts of a dense model."""


def _sum(some: Floats, others: Floats) -> Floats:
    """The sum of layers of two kinds; a field that is zero everywhere may have another shape."""
    if others is ZERO or not others.any():
        return some
    return others if some is ZERO else some + others


LAYER_KINDS = ("dense", "moe", "dense_plain", "moe_plain")
"""Fields of `Ranks` that count layers."""

FIELDS = tuple(field.name for field in fields(Ranks))

WORK = FIELDS[1 : FIELDS.index("last") + 1]
"""The fields that determine a rank's computation time; the others determine its memory."""


def _in_flight(rank: int, pipeline: int, chunks: int, schedule: Schedule) -> list[list[int]]:
    """Microbatches of each chunk of a pipeline rank at the moments that can be the fullest. 1F1B: pp - rank
    (arXiv:2104.04473, section 2.2.1).

    Interleaved: Megatron-LM's warm-up of 2 (pp - rank - 1) + (vpp - 1) pp slots plus one, with chunks taking
    turns of pp microbatches. With split backward, activations stay until weight gradients are computed. Then
    every rank has as many as the first one (ZB-H1, arXiv:2401.10241, section 2.3; ZB-V, section 6), and one
    chunk more in DualPipeV (arXiv:2412.19437, section 3.2.1, cut in half).
    """
    if schedule == "interleaved_zb":
        ends = [2 * pipeline, *[pipeline] * (chunks - 2), 0]
        return [[pipeline] * chunks, ends]
    if schedule == "zbv":
        return [[2 * pipeline - rank, rank], [2 * pipeline - rank - 1, rank + 1]]
    if schedule == "dualpipev":
        return [[2 * pipeline - rank, rank + 1]]
    if chunks == 1:
        return [[pipeline - rank]]
    slots = 2 * (pipeline - rank - 1) + (chunks - 1) * pipeline + 1
    rounds, rest = divmod(slots, pipeline * chunks)
    return [[rounds * pipeline + min(max(rest - chunk * pipeline, 0), pipeline) for chunk in range(chunks)]]


def _waiting(rank: int, schedule: Schedule) -> int:
    """Most chunks of a rank that wait for their weight gradients."""
    if schedule not in SPLIT_BACKWARD:
        return 0
    return 2 * rank + 1 if schedule == "zbv" else rank + 1


@lru_cache(maxsize=4096)
def all_ranks(
    split: tuple[int, ...],
    pipeline: int,
    leading_dense: int,
    schedule: Schedule = "interleaved",
    block: int | None = None,
    together: int = 1,
) -> Ranks:
    """Every pipeline rank of a layout, arrays of shape [pp].

    Args:
        split: layers of each stage, in the placement of `Layout.stages_of`.
        leading_dense: leading layers of the model that have a dense MLP.
        block: layers of each stage that recompute, if others do not.
        together: number of layers that share one kept input in recomputation.
    """
    chunks = len(split) // pipeline
    place = np.arange(len(split)).reshape(chunks, pipeline)
    if schedule in V_SCHEDULES:
        place[1] = place[1, ::-1].copy()
    sizes = np.array(split)[place]
    starts = np.concatenate(([0], np.cumsum(split)[:-1]))[place]
    dense, moe, dense_plain, moe_plain = layers_by_kind(
        sizes, np.clip(leading_dense - starts, 0, sizes), block
    )
    rank = np.arange(pipeline)
    # [moments, chunks, ranks]
    flight = np.array([_in_flight(each, pipeline, chunks, schedule) for each in range(pipeline)]).transpose(
        1, 2, 0
    )

    def alive(layers: Ints) -> Ints:
        most: Ints = (layers * flight).sum(axis=1).max(axis=0)
        return most

    columns = {
        "count": np.ones(pipeline),
        "dense": dense.sum(axis=0),
        "moe": moe.sum(axis=0),
        "dense_plain": dense_plain.sum(axis=0),
        "moe_plain": moe_plain.sum(axis=0),
        "first": rank == 0,
        "last": rank == (0 if schedule in V_SCHEDULES else pipeline - 1),
        "dense_in_flight": alive(-(-dense // together)),
        "moe_in_flight": alive(-(-moe // together)),
        "dense_plain_in_flight": alive(dense_plain),
        "moe_plain_in_flight": alive(moe_plain),
        "backlog": sizes.max(axis=0) * [_waiting(each, schedule) for each in range(pipeline)],
        "place": rank + 1,
    }
    return Ranks(**{name: column.astype(np.float64) for name, column in columns.items()})


def layers_by_kind(sizes: Ints, leading: Ints, block: int | None) -> tuple[Ints, Ints, Ints, Ints]:
    """Layers of stages by each of `LAYER_KINDS`, in the shape of `sizes`.

    Args:
        sizes: layers of each stage.
        leading: layers of each stage with a dense MLP, which come first.
        block: see `all_ranks`.
    """
    marked = sizes if block is None else np.minimum(sizes, block)
    dense = np.minimum(leading, marked)
    return dense, marked - dense, leading - dense, sizes - marked - (leading - dense)


Entry = tuple[tuple[int, ...], int, int, Schedule, int | None, int]
"""The arguments of `all_ranks` as a key."""


@lru_cache(maxsize=4096)
def _deciding(entry: Entry, kinds: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """The kind of node and the fields of `Ranks` for each rank that can be slowest or fullest, in pipeline
    order.

    Among equal ranks on one kind, the one with the most microbatches in flight is taken.
    """
    every = all_ranks(*entry)
    counts: Counter[tuple[float, ...]] = Counter()
    fullest: dict[tuple[float, ...], list[tuple[float, ...]]] = {}
    flight_from = 2 + len(WORK)
    for row in zip(kinds, *(getattr(every, name).tolist() for name in FIELDS), strict=True):
        work, flight = (row[0], *row[2:flight_from]), row[flight_from:]
        counts[work] += 1
        kept = fullest.setdefault(work, [])
        # The place says which rank it is, not how much it has.
        if not any(_at_most(flight[:-1], other[:-1]) for other in kept):
            kept[:] = [*(other for other in kept if not _at_most(other[:-1], flight[:-1])), flight]
    # The first of equal ranks counts for all of them.
    return tuple(
        (work[0], 0.0 if place else float(counts[work]), *work[1:], *flight)
        for work, kept in fullest.items()
        for place, flight in enumerate(kept)
    )


def _at_most(flight: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(own <= others for own, others in zip(flight, other, strict=True))


def ranks_entry(model: ModelSpec, table: LayoutTable, row: int) -> Entry:
    """The arguments of `all_ranks` for one row of a table."""
    layers = int(table.recompute_num_layers[row])
    recomputes = RECOMPUTE_KINDS[int(table.recompute[row])] != "none"
    block = recomputes and RECOMPUTE_METHODS[int(table.recompute_method[row])] == "block"
    return (
        table.splits[int(table.split[row])],
        int(table.pipeline_parallel[row]),
        model.leading_layers,
        SCHEDULES[int(table.schedule[row])],
        layers if block else None,
        1 if block or not recomputes else layers,
    )


def stage_ranks(model: ModelSpec, table: LayoutTable, row: int) -> Ranks:
    """The stages of one row, as if each were a separate rank: arrays of shape [stages]."""
    split, _, leading_dense, _, block, together = ranks_entry(model, table, row)
    return all_ranks(split, len(split), leading_dense, "1f1b", block, together)


def critical_ranks(
    model: ModelSpec, table: LayoutTable, cluster: Cluster | None = None
) -> tuple[Ranks, Ints]:
    """The ranks that can be slowest or fullest, for every row of a table, and their kinds of nodes: [n, k].

    Args:
        cluster: cluster with the kinds of nodes; all nodes are of one kind if None.
    """
    columns = [table.split, table.pipeline_parallel, table.schedule]
    if table.recompute_num_layers.max(initial=1) > 1 or table.recompute_method.any():
        columns += [table.recompute != NONE, table.recompute_method, table.recompute_num_layers]
    first, code = distinct_rows(columns)
    found = []
    for row in first:
        entry = ranks_entry(model, table, int(row))
        kinds = (0,) * entry[1]
        if cluster is not None and cluster.parts:
            kinds = tuple(rank_kinds(cluster, entry[1]).tolist())
        found.append(_deciding(entry, kinds))
    filled = np.zeros((1 + len(FIELDS), len(found), max(map(len, found), default=1)))
    for index, entries in enumerate(found):
        filled[:, index, : len(entries)] = np.transpose(entries)
        # The entries that fill up a row must not look like another kind.
        filled[0, index, len(entries) :] = entries[-1][0]
    ranks = Ranks(
        **{
            name: column.take(code, axis=0) if column.any() or name == "dense" else ZERO
            for name, column in zip(FIELDS, filled[1:], strict=True)
        }
    )
    if filled[0].any():
        return ranks, filled[0, code].astype(np.int64)
    return ranks, np.broadcast_to(np.int64(0), ranks.count.shape)


def in_flight(ranks: Ranks, micro_batches: Floats) -> dict[str, Floats]:
    """Layers in flight at the peak, by kind of layer, for given microbatches.

    The kinds are the fields of `Ranks` that count layers; kinds that no rank has are left out.
    """
    return {
        kind: np.minimum(getattr(ranks, f"{kind}_in_flight"), micro_batches * getattr(ranks, kind))
        for kind in LAYER_KINDS
        if getattr(ranks, kind).any()
    }


def ranks_of_table(model: ModelSpec, table: LayoutTable) -> Ranks:
    """All pipeline ranks of each row, arrays of shape [n, k]; entries beyond a row's ranks are empty."""
    every = [all_ranks(*ranks_entry(model, table, row)) for row in range(len(table))]
    filled = np.zeros((len(FIELDS), len(table), max(len(ranks.count) for ranks in every)))
    for row, ranks in enumerate(every):
        for column, name in zip(filled, FIELDS, strict=True):
            column[row, : len(ranks.count)] = getattr(ranks, name)
    return Ranks(**dict(zip(FIELDS, filled, strict=True)))
