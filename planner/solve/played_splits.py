"""Layers of stages, moved one at a time for a few plans, by simulated pipelines.

Closed forms choose the layers of stages first (`planner.solve.splits`, `planner.solve.chunk_splits`). For
steps with few microbatches, closed forms give equal times to splits whose simulated pipelines differ by a few
percent. The position of the slowest rank and the overlap of the others matter then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from costmodels.pricing import Prices, price
from costmodels.spec.layout import even_split
from costmodels.spec.table import ARRAY_FIELDS, Bools, Ints, LayoutTable, distinct_rows, numbered_splits
from costmodels.time.simulation import STEADY_BATCHES
from planner.problem import Problem
from planner.solve.chunk_splits import MOVES, has_movable_layers, moves_of
from planner.solve.concatenation import concatenate_prices
from planner.solve.recompute import first_of_each

PLANS = 4
"""Number of plans at the top of a ranking whose layers are moved; plans that differ only in layers count
once."""

TRIED = 24
"""Most splits of a plan that are simulated for one move, the best ones by closed forms."""

NEAR = 1.2
"""The largest ratio of a split's time to that of the best split, by closed forms."""

GAIN = 1e-6
"""Relative gain below which no layer is moved."""

MOST_PASSES = 60_000
"""Most passes of pipelines that are simulated."""


def played_moves(
    problem: Problem, first: Prices, allowed: Callable[[Prices], Bools] | None = None
) -> Prices | None:
    """Plans of `first` that become faster when layers move between stages, after these moves.

    Args:
        first: prices of layouts that fit, the best ones first, with simulated pipelines.
        allowed: test of the layouts that may be answers; if None, all that fit may be.
    """
    some = np.flatnonzero(has_movable_layers(problem, first.table))
    if not len(some) or "layers_per_stage" in problem.pins:
        return None
    columns = [getattr(first.table, name)[some] for name in ARRAY_FIELDS if name != "split"]
    now = first.take(some[np.sort(distinct_rows(columns)[0])[:PLANS]])
    before, left = now.step_time_s, MOST_PASSES
    open_rows = np.arange(len(now))
    for _ in range(MOVES):
        row, tried = _tried(problem, now, open_rows, allowed)
        passes = played_passes(tried.table).cumsum()
        if not len(row) or passes[0] > left:
            break
        within = slice(0, int(np.searchsorted(passes, left, side="right")))
        left -= int(passes[within][-1])
        row, tried = row[within], tried.take(within)
        tried = tried.simulate(np.arange(len(tried)))
        best = first_of_each(row, tried.step_time_s)
        best = best[tried.step_time_s[best] < now.step_time_s[row[best]] * (1 - GAIN)]
        if not len(best):
            break
        open_rows = row[best]
        kept = np.delete(np.arange(len(now)), open_rows)
        back = np.argsort(np.concatenate([kept, open_rows]))
        now = concatenate_prices([now.take(kept), tried.take(best)]).take(back)
    faster = now.step_time_s < before
    return now.take(faster) if faster.any() else None


def _tried(
    problem: Problem, now: Prices, rows: Ints, allowed: Callable[[Prices], Bools] | None
) -> tuple[Ints, Prices]:
    """Splits to simulate, the better ones of each row first, and the rows that they belong to."""
    row, splits = moves_of(problem)(now.table, rows)
    if not len(row):
        return row, now.take(row)
    own, which = numbered_splits(splits)
    table = replace(now.table.take(row), split=which, splits=own)
    prices = price(problem.model, problem.cluster, problem.constants, table)
    good = prices.peak_memory_bytes <= problem.cluster.memory_bytes
    if allowed is not None:
        good &= allowed(prices)
    row, prices = row[good], prices.take(good)
    order = np.lexsort((_longest(prices.table), prices.step_time_s, row))
    row, seconds = row[order], prices.step_time_s[order]
    starts = np.searchsorted(row, row)
    place = np.arange(len(row)) - starts
    some = np.flatnonzero((place < TRIED) & (seconds <= NEAR * seconds[starts]))
    some = some[np.argsort(place[some], kind="stable")]
    return row[some], prices.take(order[some])


def _longest(table: LayoutTable) -> Ints:
    """The sum of squared layers of stages, [n]; smaller for more even splits."""
    return np.array([sum(each * each for each in split) for split in table.splits], dtype=np.int64)[
        table.split
    ]


def has_even_stages(table: LayoutTable) -> Bools:
    """Rows whose stages have the enumerated layers, [n]."""
    even = [split == even_split(sum(split), len(split)) for split in table.splits]
    return np.array(even, dtype=np.bool_)[table.split]


def played_passes(table: LayoutTable) -> Ints:
    """Number of simulated passes of the pipeline of each row, [n]."""
    pipeline = table.pipeline_parallel
    # Long schedules are played until they are steady, which most are by then.
    played = np.minimum(table.micro_batches, 2 * STEADY_BATCHES * pipeline)
    result: Ints = np.where(pipeline > 1, 2 * played * pipeline * table.virtual_pipeline_parallel, 0)
    return result
