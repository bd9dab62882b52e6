"""Lower bounds of time and memory for all layouts, so only a few rows are solved and priced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.moments import least_moment
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import row_unit_sizes
from costmodels.pricing import Prices
from costmodels.ranks.rank_layers import ZERO, Ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.row_blocks import block_results
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable, distinct_rows
from costmodels.time.passes import PARTS, Passes
from costmodels.time.unit_times import unit_passes
from planner.objective import Objective, slowness
from planner.space.grid import Space
from planner.space.grid_table import Places

ANYWAY = tuple(part for part in PARTS if part != "offload")
"""Parts of a layer's time that recomputation does not reduce; activations that are not kept need not be
moved."""


@dataclass(frozen=True)
class Worth:
    """A test if rows with given seconds would be among the first of a ranking."""

    objective: Objective
    last: float
    """Slowness of the last plan among the first of the ranking."""
    first: Floats | None = None
    """`slowness` of the first plans of the ranking; None where the test stays as it is whatever is found."""

    @classmethod
    def among(cls, objective: Objective, slowness: Floats, places: int) -> Worth:
        """The test for the first `places` of a ranking; whatever there is passes while they are not full.

        Args:
            slowness: that of all plans so far, [n].
        """
        if len(slowness) < places:
            padded = np.concatenate([slowness, np.full(places - len(slowness), np.inf)])
            return cls(objective, np.inf, padded)
        first = np.partition(slowness, places - 1)[:places]
        return cls(objective, float(first[-1]), first)

    def __call__(self, table: LayoutTable, seconds: Floats) -> Bools:
        result: Bools = slowness(self.objective, table.global_batch_size, seconds) <= self.last
        return result

    def beside(self, found: Sequence[Prices]) -> Worth:
        """The test for the first places of the ranking after the plans of `found` are added to it.

        Plans that offload do not count: the host may not hold what they keep there.
        """
        if self.first is None:
            return self
        more = [self.first]
        for prices in found:
            table = prices.table
            own = slowness(self.objective, table.global_batch_size, prices.step_time_s)
            more.append(own[~(table.offload_activations | table.offload_optimizer)])
        return Worth.among(self.objective, np.concatenate(more), len(self.first))


def in_rounds(
    pace: Floats, worth: Worth, first: int, solve: Callable[[Ints, Worth], Prices | None]
) -> list[Prices]:
    """Prices of the solved variants of rows, in the order of their pace, as long as they could be worth it.

    Args:
        pace: the slowness of each row at least, [n].
        worth: the test before the first round; what a round finds makes it stricter.
        first: rows of the first round; each later one has twice as many.
        solve: a function that solves some rows.
    """
    order = np.argsort(pace, kind="stable")
    found: list[Prices] = []
    start, size = 0, first
    while start < len(order):
        rows = order[start : start + size]
        rows = rows[pace[rows] <= worth.last]
        if not len(rows):
            break
        solved = solve(np.sort(rows), worth)
        if solved is not None:
            found.append(solved)
            worth = worth.beside([solved])
        start, size = start + size, 2 * size
    return found


@dataclass(frozen=True)
class Floor:
    """Lower bounds of slowness for the layouts of a space, for any recomputation and any exchange of
    replicas."""

    work: Places
    """Index of each row's group; rows of a group have equal work (`planner.space.grid.Space.work`)."""
    slowness: Floats
    """The least slowness of each group of equal work."""

    def of(self, rows: Ints) -> Floats:
        """The least slowness of some rows, [n]."""
        least: Floats = self.slowness[self.work[rows]]
        return least

    def rows_below(self, rows: Ints, last: float) -> Ints:
        """The rows of `rows` whose floor is low enough."""
        return rows[self.of(rows) <= last]


def floor_of(model: ModelSpec, cluster: Cluster, engine: Engine, space: Space, objective: Objective) -> Floor:
    """The floor of a space."""
    first, some = first_rows(space.work)
    table = space.table.take(first[some])
    whole, _ = least_units(model, cluster, engine, table)
    seconds = least_step_seconds(table, whole, whole / table.pipeline_parallel)
    least = np.full(len(first), np.inf)
    # Sums in another order are equal to so many digits.
    least[some] = slowness(objective, table.global_batch_size, seconds) * (1 - 1e-9)
    return Floor(space.work, least)


def first_rows(number: Places) -> tuple[Ints, Bools]:
    """The first row with each number, -1 for unused numbers, and the used numbers."""
    first = np.full(int(number.max(initial=-1)) + 1, -1)
    first[number[::-1]] = np.arange(len(number), dtype=np.int32)[::-1]
    return first, first >= 0


def least_units(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[Floats, Floats]:
    """Seconds of the parts `ANYWAY` for one microbatch: on all pipeline ranks together, and in one layer,
    [n]."""
    first, shape = distinct_rows(
        [
            table.tensor_parallel,
            table.sequence_parallel,
            table.context_parallel,
            table.context_parallel_form,
            table.expert_parallel,
            table.expert_tensor_parallel,
            table.micro_batch_size,
            table.offload_activations,
            table.keeps_whole,
            table.runs(*SPLIT_BACKWARD),
        ]
    )
    none = np.zeros(len(first), dtype=np.int64)
    plain = replace(
        table.take(first),
        recompute=none,
        recompute_modules=none,
        recompute_method=none,
        recompute_num_layers=none + 1,
    )
    parts = [(part, engine.for_device(part.device)) for part in cluster.parts or (cluster,)]

    def both(block: LayoutTable) -> Floats:
        units = [unit_passes(model, part, own, block) for part, own in parts]
        whole = [_whole(model, each, ANYWAY) for each in units]
        layer = [_layer(model, each, ANYWAY) for each in units]
        return np.stack([np.minimum.reduce(whole), np.minimum.reduce(layer)])

    each: Floats = np.concatenate([*block_results(both, plain)], axis=1)[:, shape]
    return each[0], each[1]


def least_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Lower bound of the seconds of a step of each row, for any layers of its stages, [n].

    A step takes at least as long as its slowest pipeline rank computes, and so at least as long as the mean
    rank. That is the seconds of one microbatch on all stages, over pp, times the microbatches; in 1F1B
    `least_step` is added. Partial recomputation counts as none. Offloading counts as free, since layers that
    recompute more move less.
    """
    shapes, shape = distinct_shapes(table)
    units = unit_passes(model, cluster, engine.for_device(cluster.device), shapes)
    whole = _whole(model, units, ANYWAY)[shape]
    return least_step_seconds(table, whole, whole / table.pipeline_parallel)


def _layer(model: ModelSpec, units: Mapping[str, Passes], parts: Collection[str]) -> Floats:
    """Seconds of the given parts for one microbatch in the fastest kind of layer, [n]."""
    kinds = ["dense"] * (model.leading_layers > 0) + ["moe"] * (model.routed_layers > 0)
    every = [sum((getattr(units[kind], part) for part in parts), np.zeros(())) for kind in kinds]
    least: Floats = np.minimum.reduce(every)
    return least


def _whole(model: ModelSpec, units: Mapping[str, Passes], parts: Collection[str]) -> Floats:
    """Seconds of the given parts for one microbatch on all pipeline ranks together, [n]."""
    count = {"dense": model.leading_layers, "moe": model.routed_layers, "first": 1, "last": 1}
    whole: Floats = np.zeros(())
    for kind, number in count.items():
        if number:
            unit = units.get(f"{kind}_plain", units[kind])
            whole = whole + number * sum((getattr(unit, part) for part in parts), np.zeros(()))
    return whole


def least_step_seconds(table: LayoutTable, whole: Floats, slowest: Floats) -> Floats:
    """Lower bound of the seconds of a step, [n].

    In interleaved schedules the bubble is the time of all ranks but the slowest, divided by their chunks.

    Args:
        whole: seconds of one microbatch on all pipeline ranks together, [n].
        slowest: seconds of one microbatch on the slowest rank, or a lower bound, [n].
    """
    chunks, seconds = table.virtual_pipeline_parallel, slowest * table.micro_batches
    seconds = np.where(table.runs("interleaved"), seconds + (whole - slowest) / chunks, seconds)
    return np.where(table.runs("1f1b"), least_step(table, whole, slowest), seconds)


def rows_worth(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    table: LayoutTable,
    rows: Ints,
    worth: Worth,
    floor: Floor,
) -> Ints:
    """The rows of `rows` that could be worth it with any layers of their stages."""
    rows = floor.rows_below(rows, worth.last)
    if not len(rows):
        return rows

    def could_be(some: LayoutTable) -> Bools:
        return worth(some, least_seconds(model, cluster, engine, some))

    found: Ints = rows[np.concatenate([*block_results(could_be, table, rows)])]
    return found


def least_step(table: LayoutTable, whole: Floats, slowest: Floats) -> Floats:
    """Lower bound of the seconds of a 1F1B step, [n].

    B is the time of the slowest rank, S of all ranks, and A of the W ranks behind the slowest one. The closed
    form (`costmodels.time.bubble.uneven_bubble_seconds`) has a bubble of at least (S - B - A) + max(2 A - W
    B, 0), which is least for A = W B / 2 and W = pp - 1.

    Args:
        whole: S, seconds of one microbatch on all ranks together, [n].
        slowest: B, seconds of one microbatch on the slowest rank, or a lower bound, [n].
    """
    half = (table.pipeline_parallel - 1) / 2
    least: Floats = whole + (table.micro_batches - 1 - half) * slowest
    return least


def least_peak(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Lower bound of the bytes of the fullest device of each 1F1B row, for any layers of its stages, [n].

    Bytes are sums and maxima of quantities that are proportional to the contents of a stage. So the fullest
    stage holds at least as much as a stage with the mean contents. Stage s of pp keeps pp - s microbatches of
    each layer. The sum is least if all but one layer of each stage are on the last stage. Leading dense
    layers of a model with experts are left out.
    """
    engine = engine.for_device(cluster.device)
    shapes, shape = distinct_shapes(table)
    pipeline = table.pipeline_parallel.astype(np.float64)[:, None]
    layers = model.routed_layers or model.layers
    held = layers / pipeline
    # Of stages without such a layer, the first ones may have none of them.
    alone = np.minimum(pipeline, layers)
    flying = (alone * (alone + 1) / 2 + (layers - alone)) / pipeline
    own, other = ("moe", "dense") if model.routed_layers else ("dense", "moe")
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
        place=ZERO,
        **{own: held, other: zero, f"{own}_in_flight": flying, f"{other}_in_flight": zero},
    )
    sizes = row_unit_sizes(model, engine, shapes, shape)
    parts = stage_memory(cluster, engine, table, sizes, ranks, least_moment)
    bytes_held: Floats = sum(parts.values(), np.zeros(()))
    return bytes_held[:, 0]
