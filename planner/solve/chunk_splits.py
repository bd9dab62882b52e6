"""Layers of stages, moved one at a time for the best pipeline plans that no formula solves.

`planner.solve.splits` balances 1F1B stages with equal recomputation. In two other cases a layer on another
rank may still shorten the step: ranks with several chunks, and recomputation that was solved for the even
split. The first stage has the embedding, the last one the head. Layers are moved as long as the step gets
shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from costmodels.pricing import Prices, price, step_time
from costmodels.spec.layout import V_SCHEDULES, Layout, even_split
from costmodels.spec.table import (
    ARRAY_FIELDS,
    NONE,
    UNIFORM,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    distinct_rows,
    numbered_splits,
)
from planner.objective import slowness
from planner.problem import Problem
from planner.solve.bounds import Worth
from planner.solve.concatenation import concatenate_prices, without_repeats
from planner.solve.further import lists_plain_alone
from planner.solve.recompute import fastest_that_fit, first_of_each, recompute_kinds, with_recompute
from planner.space.rules import LONGEST_CHUNK, RULES
from planner.space.shared_stages import shared_splits

ROWS = 12
"""Number of plans whose layers are moved."""

MOVES = 8
"""Most moves of one layer for a plan."""

RANKS = 8
"""Most pipeline ranks from which layers are moved."""

STAGES = 8
"""Number of stages up to which a layer may move between any two."""

NEAR = 1.3
"""The largest ratio of a plan's time to that of the last of the first places; moves seldom gain more."""

UNFIT = 1e30
"""Seconds that stand for a plan that does not fit; longer than any step."""

GAIN = 1e-4
"""Relative gain below which no layer is moved."""


def moved_layers(problem: Problem, parts: Sequence[Prices], worth: Worth) -> Prices | None:
    """The best plans of `parts` with layers moved between pipeline ranks, if this makes them faster.

    Args:
        parts: prices of layouts that fit.
        worth: test if rows with given seconds would be among the first.
    """
    moves = moves_of(problem)
    first = _best(problem, concatenate_prices(parts), NEAR * worth.last)
    if not len(first):
        return None
    now, least, before = _starts(problem, first)
    open_rows = np.arange(len(now))
    for _ in range(MOVES):
        row, splits = moves(now.table, open_rows)
        if not len(row):
            break
        own, which = numbered_splits(splits)
        tried = replace(now.table.take(row), split=which, splits=own)
        row, prices = _faster(problem, tried, row, np.where(least < UNFIT, least, np.inf))
        if not len(row):
            break
        seconds = _rated(problem, prices)
        order = first_of_each(row, seconds)
        better = order[seconds[order] < least[row[order]] * (1 - GAIN)]
        open_rows = row[better]
        if not len(open_rows):
            break
        least[open_rows] = seconds[better]
        moved = np.zeros(len(now), dtype=np.bool_)
        moved[open_rows] = True
        kept = np.flatnonzero(~moved)
        back = np.argsort(np.concatenate([kept, open_rows]))
        now = concatenate_prices([now.take(kept), prices.take(better)]).take(back)
    now = _recomputed_anew(problem, now)
    least = np.minimum(least, _rated(problem, now))
    found = (least < before) & worth(now.table, now.step_time_s)
    # Plans that differ in recomputation alone may end alike.
    every = without_repeats([now.take(found)])
    return every[0] if every else None


def _starts(problem: Problem, first: Prices) -> tuple[Prices, Floats, Floats]:
    """Plans from which moves of layers start.

    Each plan has two upper limits of seconds: for a move (`_rated`), and for a result. The plans are `first`,
    and its variants with other chunks or without recomputation, which need not fit.
    """
    known = first.step_time_s
    if problem.engine.runs.stages_alike:
        return first, known, known.copy()
    parts, least, before = [first], [known], [known]
    others = _other_chunks(problem, first)
    if others is not None:
        parts.append(others)
        least.append(others.step_time_s)
        before.append(np.full(len(others), np.inf))
    if lists_plain_alone(problem):
        # With fewer layers on the fullest rank, a layout may fit without recomputation.
        table = first.table
        plain = with_recompute(
            table.take((table.recompute != NONE) & (table.virtual_pipeline_parallel > 1)), NONE, 0
        )
        plain = plain.take(distinct_rows([getattr(plain, name) for name in ARRAY_FIELDS])[0])
        lacking = price(problem.model, problem.cluster, problem.constants, plain)
        lacking = lacking.take(lacking.peak_memory_bytes > problem.cluster.memory_bytes)
        parts.append(lacking)
        least.append(_rated(problem, lacking))
        before.append(np.full(len(lacking), UNFIT))
    return concatenate_prices(parts), np.concatenate(least), np.concatenate(before)


def _recomputed_anew(problem: Problem, now: Prices) -> Prices:
    """Plans whose layers were moved, with the fastest recomputation that fits the new split."""
    where = problem.model, problem.cluster, problem.constants
    kinds = recompute_kinds(problem.pins, problem.engine)
    rated = _rated(problem, now)
    rows = np.flatnonzero((now.table.recompute != NONE) | (rated >= UNFIT))
    if not kinds or not len(rows):
        return now
    plain = with_recompute(now.table.take(rows), NONE, 0)
    row, solved = fastest_that_fit(*where, plain, kinds, usual=True)
    better = solved.step_time_s < rated[rows[row]] * (1 - GAIN)
    row, solved = rows[row[better]], solved.take(better)
    kept = np.delete(np.arange(len(now)), row)
    back = np.argsort(np.concatenate([kept, row]))
    return concatenate_prices([now.take(kept), solved]).take(back)


def _rated(problem: Problem, prices: Prices) -> Floats:
    """Seconds of rows that fit; for other rows a larger number that grows with the lacking memory."""
    held = prices.peak_memory_bytes / problem.cluster.memory_bytes
    return np.where(held <= 1.0, prices.step_time_s, UNFIT * held)


def _other_chunks(problem: Problem, first: Prices) -> Prices | None:
    """The plans of `first` that are faster with another number of unequal chunks, each with its best number.

    Such chunks are not enumerated where a similar number of equal chunks exists. They trade messages against
    the bubble.
    """
    table, layers = first.table, problem.model.layers
    rows = np.flatnonzero(
        (table.virtual_pipeline_parallel > 1)
        & ~table.runs(*V_SCHEDULES)
        & (table.recompute_method == UNIFORM)
        & (2 * table.pipeline_parallel <= layers)
    )
    if "virtual_pipeline_parallel" in problem.pins or not len(rows):
        return None
    most = layers // table.pipeline_parallel[rows]
    row = rows.repeat(most - 1)
    chunks = np.concatenate([np.arange(2, each + 1) for each in most.tolist()])
    stages = chunks * table.pipeline_parallel[row]
    splits, split = numbered_splits([even_split(layers, each) for each in stages.tolist()])
    own = table.virtual_pipeline_parallel[row]
    other = replace(table.take(row), virtual_pipeline_parallel=chunks, splits=splits, split=split)
    new = (chunks != own) & (-(-layers // stages) * stages > LONGEST_CHUNK * layers)
    for rule in (*RULES, *problem.further):
        if not rule.redundant:
            new &= ~np.broadcast_to(rule.broken(problem.model, other), new.shape)
    row, other = row[new], other.take(new)
    if not len(row):
        return None
    row, prices = _faster(problem, other, row, first.step_time_s)
    fits = np.flatnonzero(prices.peak_memory_bytes <= problem.cluster.memory_bytes)
    best = fits[first_of_each(row[fits], prices.step_time_s[fits])]
    return prices.take(best) if len(best) else None


def _faster(problem: Problem, tried: LayoutTable, row: Ints, least: Floats) -> tuple[Ints, Prices]:
    """Prices of the variants of rows that take less time than their row, and these rows.

    The memory of unequal stages takes several times as long to price as their time.

    Args:
        row: the row of each variant, [n].
        least: seconds of each row.
    """
    where = problem.model, problem.cluster, problem.constants
    faster = step_time(*where, tried) < least[row] * (1 - GAIN)
    return row[faster], price(*where, tried.take(faster))


def has_movable_layers(problem: Problem, table: LayoutTable) -> Bools:
    """Rows with pipelines whose stages may have unequal numbers of layers, [n]."""
    runs = problem.engine.runs
    result: Bools = table.runs(*runs.uneven_schedules) & (table.pipeline_parallel > 1)
    return result & (not runs.most_even_stages)


def _best(problem: Problem, prices: Prices, last: float) -> Prices:
    """The best plans with pipelines, of those whose slowness is not above `last`."""
    slow = slowness(problem.objective, prices.table.global_batch_size, prices.step_time_s)
    rows = np.flatnonzero(has_movable_layers(problem, prices.table) & (slow <= last))
    return prices.take(rows[np.argsort(slow[rows], kind="stable")[:ROWS]])


def moves_of(problem: Problem) -> Callable[[LayoutTable, Ints], tuple[Ints, list[tuple[int, ...]]]]:
    """A function that gives other splits that the problem's engine runs, and the row of each split."""
    return _shared if problem.engine.runs.stages_alike else _moves


def _moves(table: LayoutTable, rows: Ints) -> tuple[Ints, list[tuple[int, ...]]]:
    """Splits after a move of one layer from a rank's largest stage to another rank's smallest stage, and
    their rows."""
    row: list[int] = []
    splits: list[tuple[int, ...]] = []
    for each in rows.tolist():
        layout = table.layout(each)
        for source, target in _pairs(layout):
            moved = list(layout.layers_per_stage)
            moved[source] -= 1
            moved[target] += 1
            row.append(each)
            splits.append(tuple(moved))
    return np.array(row, dtype=np.int64), splits


def _shared(table: LayoutTable, rows: Ints) -> tuple[Ints, list[tuple[int, ...]]]:
    """Splits that the engine itself computes from its settings, and their rows."""
    row: list[int] = []
    splits: list[tuple[int, ...]] = []
    for each in rows.tolist():
        layout = table.layout(each)
        own = layout.layers_per_stage
        found = shared_splits(sum(own), len(own), layout.virtual_pipeline_parallel)
        others = [split for split in found if split != own]
        row += [each] * len(others)
        splits += others
    return np.array(row, dtype=np.int64), splits


def _pairs(layout: Layout) -> Iterator[tuple[int, int]]:
    """Stages that a layer may leave, and stages that may take it."""
    split, pipeline = layout.layers_per_stage, layout.pipeline_parallel
    if len(split) <= STAGES:
        yield from (
            (source, target) for source, target in permutations(range(len(split)), 2) if split[source] > 1
        )
        return
    places = {rank: layout.stages_of(rank) for rank in range(pipeline)}
    ends = (0, len(split) - 1)
    # The first and the last stage have work of their own. A longer stage holds up least just before the last.
    largest = {
        rank: max(own, key=lambda stage: (split[stage], stage in ends)) for rank, own in places.items()
    }
    smallest = {
        rank: min(own, key=lambda stage: (split[stage], stage in ends, -stage))
        for rank, own in places.items()
    }
    apart = max(1, -(-pipeline // RANKS))
    sources = sorted({*range(0, pipeline, apart), pipeline - 1})
    for source in sources:
        for rank, target in smallest.items():
            # On the same rank, a layer may leave the stage that has work of its own.
            if (
                split[largest[source]] > 1
                and (rank != source or largest[source] in ends)
                and (target != largest[source])
            ):
                yield largest[source], target
