"""Layers of each stage, solved: the split of a 1F1B pipeline that fits and has the fastest slowest stage.

Stages are contiguous. The first one has the embedding, the last one the head. Given a bound on a stage's
seconds, each stage in turn takes as many layers as the bound and its memory allow. Taking more layers early
never leaves more for later stages. So the bound can be met if and only if the last layer is reached.
Bisection finds the least bound. Among splits with the same slowest stage, those with the fewest layers on the
largest stage are chosen, with the large stages in front or behind.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import UnitSizes, row_unit_sizes
from costmodels.rank_costs import unit_seconds
from costmodels.ranks.rank_layers import ZERO, Ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable, distinct_numbers, numbered_splits
from planner.solve.bisection import fewest_enough, least_number, most_within
from planner.solve.bounds import Worth, least_step

MOST_LEADING = 8
"""Most leading dense layers of a model with experts for which splits are solved; with more, stages stay
even."""

UNUSED = ("dense_plain", "moe_plain", "dense_plain_in_flight", "moe_plain_in_flight", "backlog", "place")
"""Fields of `Ranks` that are zero if all layers recompute the same and backward is not split."""

CLOSE = 1e-7
"""Relative width of the interval at which the bisection of the bound ends."""


@dataclass(frozen=True)
class _Job:
    """The rows to split into stages, and their sizes."""

    model: ModelSpec
    cluster: Cluster
    engine: Engine
    """The engine with its constants for the device."""
    table: LayoutTable
    sizes: UnitSizes

    def take(self, rows: Ints) -> _Job:
        """Some of the rows."""
        sizes = UnitSizes(**{name: held[rows] for name, held in vars(self.sizes).items()})
        return replace(self, table=self.table.take(rows), sizes=sizes)


@dataclass(frozen=True)
class _Stages:
    """Stages of rows; arrays of [n, stages] or of [n]."""

    leading: int
    """Leading layers that differ from the others: dense layers of a model with experts."""
    layers: int
    there: Bools
    """Mask of the stages that the row has."""
    fixed: Floats
    """Seconds of a stage without layers: of the embedding or of the head."""
    plain: Floats
    """Seconds of a leading layer, [n]."""
    usual: Floats
    """Seconds of any other layer, [n]."""

    def take(self, rows: Ints) -> _Stages:
        """Some of the rows."""
        names = ("there", "fixed", "plain", "usual")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def whole(self) -> Floats:
        """Seconds of all stages together, [n]."""
        layers = self.leading * self.plain + (self.layers - self.leading) * self.usual
        every: Floats = layers + self.fixed.sum(axis=1)
        return every

    def distinct(self) -> tuple[Ints, Ints]:
        """The first row of each group of equal rows, and the group of each row."""
        columns = [self.there.sum(axis=1), self.plain, self.usual, self.fixed.sum(axis=1)]
        _, first, alike = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        return first, alike.reshape(-1)

    def most(self, bound: Floats, caps: Ints, level: Ints) -> Ints:
        """Most layers that each stage can take in turn, [n, stages]; they may exceed the layers of the model.

        Args:
            bound: seconds that no stage may exceed, [n].
            caps: layers that fit into the memory of each stage, [n, stages, leading + 1], by the number of
                leading layers before it.
            level: most layers of any stage, [n].
        """
        left = bound[:, None] - self.fixed
        count = np.floor(left / self.usual[:, None] * (1 + 1e-12)).astype(np.int64)
        count = np.minimum(np.minimum(count, caps[:, :, self.leading]), level[:, None])
        start = np.zeros(len(bound), dtype=np.int64)
        rows = np.arange(len(bound))
        for stage in range(min(self.leading, count.shape[1])):
            ahead = np.maximum(self.leading - start, 0)
            seconds = left[:, stage] * (1 + 1e-12)
            over = (seconds - ahead * self.plain) / self.usual
            own = np.where(over >= 0, ahead + np.floor(over), np.floor(seconds / self.plain)).astype(np.int64)
            own = np.minimum(np.minimum(own, caps[rows, stage, np.minimum(start, self.leading)]), level)
            count[:, stage] = own
            start = start + own
        return np.where(self.there, count, 0)

    def reaches(self, count: Ints) -> Bools:
        """Return whether stages with at most the given layers hold all layers, and none is empty, [n]."""
        result: Bools = (count.sum(axis=1) >= self.layers) & ((count >= 1) | ~self.there).all(axis=1)
        return result

    def seconds(self, split: Ints) -> Floats:
        """Seconds of each stage of a split, [n, stages]."""
        ends = np.minimum(np.cumsum(split, axis=1), self.leading)
        ahead = np.diff(ends, axis=1, prepend=0)
        result: Floats = self.fixed + ahead * self.plain[:, None] + (split - ahead) * self.usual[:, None]
        return np.where(self.there, result, 0.0)


def balanced_splits(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, fits: Bools, worth: Worth
) -> tuple[Ints, LayoutTable]:
    """Rows of `table` with uneven layers per stage, and the row that each belongs to.

    Rows are left out where nothing fits, where the even split is as good, and where the result could not be
    worth it. A row has two results where the larger stages may be in front or behind; one of them may not
    fit.

    Args:
        table: rows of the schedule 1f1b with even stages, which recompute the same in all layers.
        fits: rows that are within the device's memory.
        worth: test of whether rows with so many seconds would be among the first.
    """
    leading = model.leading_layers if model.routed_layers else 0
    none = np.zeros(0, dtype=np.int64)
    if not len(table) or leading > MOST_LEADING:
        return none, table.take(none)
    engine = engine.for_device(cluster.device)
    stages = _stages(model, cluster, engine, table, leading)
    first, alike = stages.distinct()
    bound, split = _solve(stages.take(first), None)
    bound, split = bound[alike], split[alike]
    even = _even(table, stages)
    better = (bound < stages.seconds(even).max(axis=1) * (1 - 1e-9)) | ~fits
    rows = np.flatnonzero(better & worth(table, least_step(table, stages.whole, bound)))
    part = table.take(rows)
    job = _Job(model, cluster, engine, part, row_unit_sizes(model, engine, *distinct_shapes(part)))
    stages, bound, split = stages.take(rows), bound[rows], split[rows]
    caps = np.full((*split.shape, leading + 1), model.layers)
    tight = np.flatnonzero(~_fits(job, stages, split))
    if len(tight):
        # A split that is best without regard to memory and fits is best. The others get as many layers as
        # fit.
        some = stages.take(tight)
        caps[tight] = _caps(job.take(tight), some)
        bound[tight], split[tight] = _solve(some, caps[tight])
    slowest = stages.seconds(even[rows]).max(axis=1)
    good = np.flatnonzero(np.isfinite(bound) & ((bound < slowest * (1 - 1e-9)) | ~fits[rows]))
    stages, bound, split, rows = stages.take(good), bound[good], split[good], rows[good]
    level = split.max(axis=1, initial=0)
    mirrored = _shortened(stages, stages.most(bound, caps[good], level), level, front=True)
    row = np.concatenate([rows, rows])
    words = [tuple(part[part > 0].tolist()) for part in np.concatenate([split, mirrored])]
    splits, places = numbered_splits(words)
    once = np.unique(np.stack([row, places]), axis=1, return_index=True)[1]
    return row[once], replace(table.take(row[once]), split=places[once], splits=splits)


def _even(table: LayoutTable, stages: _Stages) -> Ints:
    """The present layers of each stage of the rows, [n, stages]."""
    even = np.zeros(stages.there.shape, dtype=np.int64)
    for each in distinct_numbers(table.split):
        layers = table.splits[each]
        even[table.split == each, : len(layers)] = layers
    return even


def _stages(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, leading: int) -> _Stages:
    dense, moe, first, last = unit_seconds(model, cluster, engine, table)[:, 0].T
    pipeline = table.pipeline_parallel[:, None]
    stage = np.arange(int(table.pipeline_parallel.max()))[None, :]
    fixed = first[:, None] * (stage == 0) + last[:, None] * (stage == pipeline - 1)
    usual = moe if model.routed_layers else dense
    return _Stages(leading, model.layers, stage < pipeline, fixed, dense, usual)


def _solve(stages: _Stages, caps: Ints | None) -> tuple[Floats, Ints]:
    """The least seconds of the slowest stage of each row, with the split; infinite where no split fits."""
    rows = len(stages.usual)
    whole = np.full(rows, stages.layers)
    if caps is None:
        caps = np.full((*stages.there.shape, stages.leading + 1), stages.layers)
    low = stages.whole / stages.there.sum(axis=1) * (1 - 1e-9)
    high = stages.whole.copy()
    # Stages that take layers until they reach the mean exceed it by less than a layer.
    near = np.maximum(low, stages.fixed.max(axis=1)) + np.maximum(stages.plain, stages.usual)
    near = np.minimum(near * (1 + 1e-9), high)
    high = np.where(stages.reaches(stages.most(near, caps, whole)), near, high)
    possible = stages.reaches(stages.most(high, caps, whole))
    least = least_number(
        lambda bound: stages.reaches(stages.most(bound, caps, whole)), low, high, close=CLOSE
    )
    level = fewest_enough(
        lambda level: stages.reaches(stages.most(least, caps, level)), np.ones(rows, dtype=np.int64), whole
    )
    split = _shortened(stages, stages.most(least, caps, level), level, front=False)
    bound = np.where(possible, stages.seconds(split).max(axis=1), np.inf)
    return bound, split


def _shortened(stages: _Stages, count: Ints, level: Ints, front: bool) -> Ints:
    """`count` with the surplus layers removed, one from each of the largest stages, [n, stages].

    Either the first or the last stages lose a layer; stages that can hold leading layers come last.
    """
    order = np.arange(count.shape[1]) if front else np.arange(count.shape[1])[::-1]
    order = np.concatenate([order[order >= stages.leading], order[order < stages.leading]])
    largest = (count == level[:, None])[:, order]
    surplus = count.sum(axis=1) - stages.layers
    less = np.zeros_like(count)
    less[:, order] = largest & (np.cumsum(largest, axis=1) <= surplus[:, None])
    return count - less


def _ranks(stages: _Stages, split: Ints, before: Ints, has_experts: bool) -> Ranks:
    """Contents of stages with `split` layers each, with `before` layers before them, as entries of pipeline
    ranks."""
    pipeline = stages.there.sum(axis=1)[:, None]
    stage = np.broadcast_to(np.arange(split.shape[1]), split.shape)
    ahead = np.clip(stages.leading - before, 0, split) if has_experts else split
    flying = pipeline - stage
    dense, moe = ahead.astype(np.float64), (split - ahead).astype(np.float64)
    return Ranks(
        count=np.ones(split.shape),
        dense=dense,
        moe=moe if has_experts else ZERO,
        first=(stage == 0) * 1.0,
        last=(stage == pipeline - 1) * 1.0,
        dense_in_flight=dense * flying,
        moe_in_flight=moe * flying if has_experts else ZERO,
        **dict.fromkeys(UNUSED, ZERO),
    )


def _bytes(job: _Job, stages: _Stages, split: Ints, before: Ints) -> Floats:
    """Bytes of the first stages of each row, as many as `split` has, [n, stages]; 0 for missing stages."""
    ranks = _ranks(stages, split, before, job.model.routed_layers > 0)
    held = stage_memory(job.cluster, job.engine, job.table, job.sizes, ranks)
    return np.where(stages.there[:, : split.shape[1]], sum(held.values(), np.zeros(())), 0.0)


def _fits(job: _Job, stages: _Stages, split: Ints) -> Bools:
    """Return whether every stage of a split is within the memory of a device, [n]."""
    held = _bytes(job, stages, split, np.cumsum(split, axis=1) - split)
    result: Bools = held.max(axis=1) <= job.cluster.memory_bytes
    return result


def _caps(job: _Job, stages: _Stages) -> Ints:
    """The most layers of each stage that fit, [n, stages, leading + 1], by the leading layers before it.

    No stage is empty, so that only the first stages have fewer than the leading layers before them.
    """
    caps = np.zeros((*stages.there.shape, stages.leading + 1), dtype=np.int64)
    for start in range(stages.leading + 1):
        last = start + 1 if start < stages.leading else stages.there.shape[1]
        before = np.full((len(caps), min(last, stages.there.shape[1])), start)

        def held(split: Ints, before: Ints = before) -> Floats:
            return _bytes(job, stages, split, before)

        most = np.full_like(before, stages.layers)
        found = most_within(held, job.cluster.memory_bytes, np.zeros_like(before), most)
        caps[:, : before.shape[1], start] = found
    return caps
