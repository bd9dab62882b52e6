"""Layouts for nodes of two kinds: a test of memory, and layers of stages that suit the kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, peak_memory, price
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Recompute
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import FULL, NONE, SELECTIVE, UNIFORM, Floats, Ints, LayoutTable, distinct_numbers
from planner.solve.bounds import Worth
from planner.solve.concatenation import concatenate_prices
from planner.solve.fit import Fit
from planner.solve.mixed_caps import caps_of_ranks, exact_caps
from planner.solve.mixed_splits import (
    BEST,
    Pipelines,
    equal_chunks,
    layers_of_ranks,
    least_bound,
    pipelines,
    with_layers,
)
from planner.solve.recompute import (
    MOST_MODULES,
    fastest_that_fit,
    first_of_each,
    with_recompute,
)

ROUND = 256
"""Rows whose layers are solved in the first round; each later one has twice as many."""

MOST_PLAYED = 100
"""Most pipelines that are simulated to choose among the layers of stages of the same row."""

WorthAmong = Callable[[Sequence[Prices]], Worth]
"""A function that makes a test if rows would be among the first of the prices so far."""

Where = tuple[ModelSpec, Cluster, Engine]


def fit_of_kinds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Fit:
    """The layouts that fit, as `planner.solve.fit.fit`; every other row counts as one that other layers may
    make fit."""
    every = np.ones(len(table), dtype=bool)
    peaks = peak_memory(model, cluster, engine, table)
    return Fit(peaks <= cluster.memory_bytes, every, every, peaks)


@dataclass(frozen=True)
class _Group:
    """Rows with the same number of pipeline ranks; arrays of [n] or [n, ranks]."""

    rows: Ints
    table: LayoutTable
    pipelines: Pipelines
    bound: Floats
    """Least seconds of the slowest rank, without regard to memory."""
    caps: Ints
    within: Floats
    """Least seconds of the slowest rank with layers that may fit; infinite where none do."""

    @property
    def least(self) -> Floats:
        """Lower bound of the seconds of a step that fits."""
        return self.within * self.pipelines.micro_batches

    @property
    def least_anyway(self) -> Floats:
        """Lower bound of the seconds of a step."""
        return self.bound * self.pipelines.micro_batches


@dataclass(frozen=True)
class _Variants:
    """Variants of rows with different layers of stages."""

    row: Ints
    """The row that each price belongs to."""
    prices: Prices

    @property
    def fastest(self) -> Prices:
        """The fastest variant of each row by closed forms."""
        return self.prices.take(first_of_each(self.row, self.prices.step_time_s))


def mixed_solutions(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    table: LayoutTable,
    kinds: Collection[Recompute],
    worth_among: WorthAmong,
    prices: Prices,
) -> list[Prices]:
    """Rows of `table` with the best layers of stages that fit for the two kinds.

    Rows are solved in the order of their lower bounds, so the first ones decide which others could be worth
    it. Where the best layers do not fit, fitting layers are tried, and more recomputation.

    Args:
        kinds: kinds of recomputation that may be solved for.
        prices: prices of the rows that fit unchanged.
    """
    where = model, cluster, engine
    groups = list(_groups(where, table, worth_among([prices])))
    found = [prices]
    variants: list[_Variants] = []
    for group, some in _in_rounds(groups, [group.least for group in groups], lambda: worth_among(found)):
        variants.append(_that_fit(where, group, some))
        found.append(variants[-1].fastest)
    if kinds:
        plain = [np.where(group.table.recompute == NONE, group.least_anyway, np.inf) for group in groups]
        for group, some in _in_rounds(groups, plain, lambda: worth_among(found)):
            variants.append(_recomputing(where, group, some, kinds, worth_among(found)))
            found.append(variants[-1].fastest)
    return _played(variants, worth_among(found))


def _played(variants: Sequence[_Variants], worth: Worth) -> list[Prices]:
    """The fastest variant of each row that is worth it; for the first rows by simulated pipelines."""
    if not variants:
        return []
    row = np.concatenate([each.row for each in variants])
    prices = concatenate_prices([each.prices for each in variants])
    good = np.isin(row, row[worth(prices.table, prices.step_time_s)])
    row, prices = row[good], prices.take(good)
    best = first_of_each(row, prices.step_time_s)
    pace = prices.step_time_s / prices.table.global_batch_size
    order = row[best[np.argsort(pace[best], kind="stable")]]
    place = np.argsort(order)[np.searchsorted(np.sort(order), row)]
    first = np.argsort(place, kind="stable")[:MOST_PLAYED]
    if len(first):
        prices = prices.simulate(first)
    return [prices.take(first_of_each(row, prices.step_time_s))]


def _groups(where: Where, table: LayoutTable, worth: Worth) -> Iterator[_Group]:
    every = (
        (table.pipeline_parallel > 1)
        & (table.recompute_method == UNIFORM)
        & (table.recompute_num_layers == 1)
    )
    for pipeline in distinct_numbers(table.pipeline_parallel[every]):
        rows = np.flatnonzero(every & (table.pipeline_parallel == pipeline))
        some = pipelines(*where, table.take(rows))
        bound = least_bound(some)
        good = np.flatnonzero(worth(table.take(rows), bound * some.micro_batches))
        if not len(good):
            continue
        rows, some, bound = rows[good], some.take(good), bound[good]
        own = table.take(rows)
        caps = caps_of_ranks(*where, own, some)
        yield _Group(rows, own, some, bound, caps, least_bound(some, caps))


def _in_rounds(
    groups: Sequence[_Group], least: Sequence[Floats], worth: Callable[[], Worth]
) -> Iterator[tuple[_Group, Ints]]:
    """Rows of groups that could be worth it, in rounds, those with the lowest bounds first; results of
    earlier rounds count."""
    owner = np.repeat(np.arange(len(groups)), [len(group.rows) for group in groups])
    local = np.concatenate([np.arange(len(group.rows)) for group in groups] or [owner])
    seconds = np.concatenate([*least, np.zeros(0)])
    batch = np.concatenate([*(group.table.global_batch_size for group in groups), np.ones(0, dtype=np.int64)])
    order = np.argsort(seconds / batch, kind="stable")
    order = order[np.isfinite(seconds[order])]
    start, size = 0, ROUND
    while start < len(order):
        part = order[start : start + size]
        for number in distinct_numbers(owner[part]):
            some = local[part[owner[part] == number]]
            good = worth()(groups[number].table.take(some), least[number][some])
            if good.any():
                yield groups[number], some[good]
        start, size = start + size, 2 * size


def _that_fit(where: Where, group: _Group, some: Ints) -> _Variants:
    """The best layers of stages that fit for each row."""
    limit = where[1].memory_bytes
    table, part, caps = group.table.take(some), group.pipelines.take(some), group.caps[some]
    row, variants = _variants(table, part, group.within[some], caps)
    fits = peak_memory(*where, variants) <= limit
    found, base = [price(*where, variants.take(fits))], [row[fits]]
    others = np.setdiff1d(row, row[fits])
    if len(others):
        table, part = table.take(others), part.take(others)
        caps = exact_caps(*where, table, part, caps[others])
        bound = least_bound(part, caps)
        good = np.flatnonzero(np.isfinite(bound))
        row, variants = _variants(table.take(good), part.take(good), bound[good], caps[good])
        fits = peak_memory(*where, variants) <= limit
        found.append(price(*where, variants.take(fits)))
        base.append(others[good][row[fits]])
    return _Variants(group.rows[some[np.concatenate(base)]], concatenate_prices(found))


def _recomputing(
    where: Where, group: _Group, some: Ints, kinds: Collection[Recompute], worth: Worth
) -> _Variants:
    """The best layers of stages of each row that do not fit, with the least recomputation that makes them
    fit."""
    row, plain = _variants(group.table.take(some), group.pipelines.take(some), group.bound[some], None, 1)
    whole = ("full" in kinds) & ~plain.runs(*SPLIT_BACKWARD)
    most = with_recompute(plain, np.where(whole, FULL, SELECTIVE), MOST_MODULES)
    limit = where[1].memory_bytes
    could = np.flatnonzero((peak_memory(*where, plain) > limit) & (peak_memory(*where, most) <= limit))
    row, plain = row[could], plain.take(could)
    good = worth(plain, price(*where, plain).step_time_s)
    base, prices = fastest_that_fit(*where, plain.take(good), kinds)
    return _Variants(group.rows[some[row[good][base]]], prices)


def _variants(
    table: LayoutTable, some: Pipelines, bound: Floats, caps: Ints | None, best: int = BEST
) -> tuple[Ints, LayoutTable]:
    """Rows with new layers of stages, each once, and the row that each belongs to."""
    counts, row = layers_of_ranks(some, bound, caps, best)
    several = np.flatnonzero((some.chunks > 1) & (some.layers % some.chunks == 0))
    if len(several):
        # Chunks that are alike do not stall each other.
        part, limits = some.take(several), None if caps is None else caps[several]
        alike, which = equal_chunks(part, limits, best)
        counts, row = np.concatenate([counts, alike]), np.concatenate([row, several[which]])
    once = np.unique(np.column_stack([row, counts]), axis=0, return_index=True)[1]
    row, other = row[once], with_layers(table, row[once], counts[once])
    own = [table.splits[split] for split in table.split[row]]
    changed = [other.splits[split] != mine for split, mine in zip(other.split, own, strict=True)]
    new = np.flatnonzero(changed)
    return row[new], other.take(new)
