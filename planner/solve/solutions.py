"""Degrees of freedom that are solved instead of enumerated, for layouts that could be among the first
plans."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from costmodels.pricing import Prices, peak_memory, price
from costmodels.spec.layout import Recompute
from costmodels.spec.table import FULL, NONE, SCHEDULES, UNIFORM, Bools, Ints, LayoutTable
from planner.objective import Objective, slowness
from planner.problem import Problem
from planner.solve.bounds import Floor, Worth, in_rounds, least_peak, least_seconds
from planner.solve.chunk_splits import moved_layers
from planner.solve.concatenation import concatenate_prices, concatenate_tables
from planner.solve.fit import Fit
from planner.solve.recompute import (
    first_of_each,
    least_recompute,
    recompute_kinds,
    with_each_recompute,
)
from planner.solve.replicas import hybrid_candidates, hybrid_solutions
from planner.solve.splits import balanced_splits
from planner.space.grid import Space
from planner.space.shared_stages import less_layers

FIRST = 20
"""Number of places of the ranking for which degrees are solved; every layout that could take one of them is
solved."""


FURTHER = 4
"""Number of places of the ranking for which layouts beyond the enumerated ones are examined."""


ROUND = 4096
"""Rows of 1F1B whose layers are balanced in the first round."""


def solutions(
    problem: Problem,
    space: Space,
    found: Fit,
    floor: Floor,
    prices: Prices,
    others: Sequence[Prices] = (),
    plain_alone: bool = False,
) -> list[Prices]:
    """Solved layouts: legal ones that fit and beat the enumerated layouts that they are derived from.

    Args:
        space: legal layouts.
        found: the listed layouts that fit.
        floor: lower bounds of slowness for the layouts of the space.
        prices: prices of layouts that fit, at least of all that would take the first `FIRST` places without
            data-parallel communication.
        others: prices of other layouts that fit, which leave fewer places.
        plain_alone: `space` lists only layouts without recomputation.
    """
    where = problem.model, problem.cluster, problem.constants
    kinds = recompute_kinds(problem.pins, problem.engine)
    own = []
    if problem.cluster.parts and "layers_per_stage" not in problem.pins:
        from planner.solve.mixed_nodes import mixed_solutions  # Few clusters have nodes of two kinds.

        own = mixed_solutions(
            *where, space.table, kinds, partial(_worth_beside, problem.objective, others), prices
        )
    if problem.objective == "memory":
        # The layouts that recompute and split most are enumerated.
        return [some for some in own if len(some)]
    worth = worth_among(problem.objective, [prices, *own, *others])
    every: list[Prices | None] = [*own]
    every.append(
        least_recompute(*where, space, found, kinds, worth, floor, plain_alone, problem.has_open_batch)
    )
    if "layers_per_stage" not in problem.pins and not problem.cluster.parts:
        solved = [some for some in every if some is not None]
        worth = worth_among(problem.objective, [prices, *solved, *others])
        every.append(balanced(problem, space.table, found, kinds, worth, floor, plain_alone))
    known = [some for some in every if some is not None]
    best = [some.take(worth(some.table, some.step_time_s)) for some in known]
    if "layers_per_stage" not in problem.pins and not problem.cluster.parts:
        worth = worth_among(problem.objective, [prices, *best, *others])
        # Moved layers may make up for a slower start.
        moved = moved_layers(problem, [prices, *known], worth)
        best += [] if moved is None else [moved]
    if "zero_replicas" not in problem.pins:
        worth = worth_among(problem.objective, [prices, *best, *others])
        gaining = concatenate_prices([part.take(hybrid_candidates(part, worth)) for part in (prices, *best)])
        copies = hybrid_solutions(*where, gaining, kinds, worth)
        best += [] if copies is None else [copies]
    return [some for some in best if len(some)]


def _worth_beside(objective: Objective, others: Sequence[Prices], parts: Sequence[Prices]) -> Worth:
    return worth_among(objective, [*others, *parts])


def worth_among(objective: Objective, parts: Sequence[Prices], places: int = FIRST) -> Worth:
    """A function that tests whether rows with given seconds would be among the first rows of all `parts`."""
    each = (slowness(objective, some.table.global_batch_size, some.step_time_s) for some in parts)
    return Worth.among(objective, np.concatenate([*each, np.zeros(0)]), places)


def worth_of_further(objective: Objective, parts: Sequence[Prices]) -> Worth:
    """A function that tests whether rows would be among the first `FURTHER` rows of all `parts`, or before
    the last one if there are fewer."""
    count = sum(len(some) for some in parts)
    return worth_among(objective, parts, max(1, min(FURTHER, count)))


def balanced(
    problem: Problem,
    table: LayoutTable,
    found: Fit,
    kinds: Collection[Recompute],
    worth: Worth,
    floor: Floor,
    plain_alone: bool,
) -> Prices | None:
    """Layouts with their best split, where the even split is slower or too big. All layers recompute the
    same: the recomputation in `table`, or any other set of modules.

    Args:
        table: legal layouts.
        found: the layouts that fit.
        kinds, worth, floor, plain_alone: as for `planner.solve.recompute.least_recompute`.
    """
    if problem.engine.runs.most_even_stages:
        return None
    where = problem.model, problem.cluster, problem.constants
    # Unequal chunks stall the schedules of several chunks at the longest one in every round.
    rows = np.flatnonzero(found.mean)
    rows = rows[table.column("pipeline_parallel", rows) > 1]
    rows = rows[table.column("schedule", rows) == SCHEDULES.index("1f1b")]
    whole = table.column("recompute_method", rows) == UNIFORM
    rows = rows[whole & (table.column("recompute_num_layers", rows) == 1)]
    rows = floor.rows_below(rows, worth.last)
    even, fits = table.take(rows), found.rows[rows]
    plain = np.flatnonzero(~fits & (even.recompute == NONE)) if kinds else np.zeros(0, dtype=np.int64)
    if len(plain):
        _, other = with_each_recompute(problem.model, problem.engine, even.take(plain), kinds, plain_alone)
        # Whole layers that all recompute keep nothing to offload.
        other = other.take(~((other.recompute == FULL) & other.offload_activations))
        even, fits = concatenate_tables([even, other]), np.append(fits, np.zeros(len(other), dtype=np.bool_))
    listed = np.arange(len(even)) < len(rows)
    seconds = least_seconds(*where, even) if len(even) else np.zeros(0)
    some = np.flatnonzero(worth(even, seconds))
    even, fits, listed, seconds = even.take(some), fits[some], listed[some], seconds[some]
    if len(even):
        fits[~listed] = peak_memory(*where, even.take(~listed)) <= problem.cluster.memory_bytes
        possible = fits | (least_peak(*where, even) <= problem.cluster.memory_bytes)
        even, fits, seconds = even.take(possible), fits[possible], seconds[possible]
    pace = slowness(problem.objective, even.global_batch_size, seconds)
    solved = in_rounds(pace, worth, ROUND, partial(_balanced_rows, problem, even, fits))
    return concatenate_prices(solved) if solved else None


def _balanced_rows(
    problem: Problem, table: LayoutTable, fit: Bools, rows: Ints, worth: Worth
) -> Prices | None:
    """The best split of some rows of 1F1B, of those that fit and are faster than the even one.

    Args:
        table: rows with even stages.
        fit: which of them fit.
        worth: as for `balanced`.
    """
    where = problem.model, problem.cluster, problem.constants
    even, fits = table.take(rows), fit[rows]
    row, splits = balanced_splits(*where, even, fits, worth)
    if problem.engine.runs.stages_alike:
        told = [less_layers(split, 1) is not None for split in splits.splits]
        own = np.array(told, dtype=np.bool_)[splits.split]
        row, splits = row[own], splits.take(own)
    if not len(splits):
        return None
    within = peak_memory(*where, splits) <= problem.cluster.memory_bytes
    row, prices = row[within], price(*where, splits.take(within))
    before = np.where(fits[row], price(*where, even.take(row)).step_time_s, np.inf)
    first = first_of_each(row, prices.step_time_s)
    return prices.take(first[prices.step_time_s[first] < before[first]])
