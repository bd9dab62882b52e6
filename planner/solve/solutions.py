"""Degrees of freedom that are solved instead of enumerated, for what could be among the first plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from costmodels.pricing import Prices, peak_memory, price
from costmodels.spec.table import SCHEDULES, UNIFORM, LayoutTable
from planner.objective import Objective, slowness
from planner.problem import Problem
from planner.solve.bounds import Floor, Worth, least_peak, rows_worth
from planner.solve.chunk_splits import moved_layers
from planner.solve.concatenation import concatenate_prices
from planner.solve.fit import Fit
from planner.solve.further import lists_plain_alone
from planner.solve.recompute import first_of_each, least_recompute, recompute_kinds
from planner.solve.replicas import hybrid_candidates, hybrid_solutions
from planner.solve.splits import balanced_splits
from planner.space.grid import Space
from planner.space.shared_stages import less_layers

FIRST = 20
"""Places of the ranking for which degrees are solved: whatever could take one of them is."""


FURTHER = 4
"""Places of the ranking for which layouts are looked at that are not enumerated."""


def solutions(
    problem: Problem,
    space: Space,
    found: Fit,
    floor: Floor,
    prices: Prices,
    others: Sequence[Prices] | None = None,
) -> list[Prices]:
    """Further layouts, legal ones that fit and beat the listed ones that they are like.

    Args:
        space: legal layouts.
        found: which of them fit.
        floor: what none of them can beat.
        prices: of those that fit; at least of all that would be in the first `FIRST` places if replicas
            exchanged nothing.
        others: of other layouts that fit, which leave fewer places, where `space` is a further one.
    """
    fewer = problem.batch.maximum and problem.objective in ("throughput", "cost")
    plain_alone, others = others is not None and lists_plain_alone(problem), others or ()
    where = problem.model, problem.cluster, problem.constants
    kinds = recompute_kinds(problem.pins, problem.engine)
    own = []
    if problem.cluster.parts and "layers_per_stage" not in problem.pins:
        from planner.solve.mixed_nodes import mixed_solutions  # Few clusters have nodes of two kinds.

        own = mixed_solutions(
            *where, space.table, kinds, partial(_worth_beside, problem.objective, others), prices
        )
    if problem.objective == "memory":
        # What recomputes and splits most is enumerated.
        return [some for some in own if len(some)]
    worth = worth_among(problem.objective, [prices, *own, *others])
    every: list[Prices | None] = [*own]
    every.append(least_recompute(*where, space, found, kinds, worth, floor, plain_alone, fewer))
    if "layers_per_stage" not in problem.pins and not problem.cluster.parts:
        every.append(_balanced(problem, space.table, found, worth, floor))
    best = [some.take(worth(some.table, some.step_time_s)) for some in every if some is not None]
    if "layers_per_stage" not in problem.pins and not problem.cluster.parts:
        worth = worth_among(problem.objective, [prices, *best, *others])
        moved = moved_layers(problem, [prices, *best], worth)
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
    """Whether rows that take so many seconds would be among the first of all `parts`."""
    each = (slowness(objective, some.table.global_batch_size, some.step_time_s) for some in parts)
    every = np.concatenate([*each, np.zeros(0)])
    last = np.partition(every, places - 1)[places - 1] if len(every) >= places else np.inf
    return Worth(objective, float(last))


def worth_of_further(objective: Objective, parts: Sequence[Prices]) -> Worth:
    """Whether rows would be among the first `FURTHER` of all `parts`, or ahead of the last of fewer."""
    count = sum(len(some) for some in parts)
    return worth_among(objective, parts, max(1, min(FURTHER, count)))


def _balanced(problem: Problem, table: LayoutTable, found: Fit, worth: Worth, floor: Floor) -> Prices | None:
    """Layouts with the split that is best, of those that the even split makes slower or too big."""
    where = problem.model, problem.cluster, problem.constants
    # Unequal chunks stall the schedules of several chunks at the longest one in every round.
    rows = np.flatnonzero(found.mean)
    rows = rows[table.column("pipeline_parallel", rows) > 1]
    rows = rows[table.column("schedule", rows) == SCHEDULES.index("1f1b")]
    whole = table.column("recompute_method", rows) == UNIFORM
    rows = rows[whole & (table.column("recompute_num_layers", rows) == 1)]
    rows = rows_worth(*where, table, rows, worth, floor)
    if len(rows):
        possible = least_peak(*where, table.take(rows)) <= problem.cluster.memory_bytes
        rows = rows[found.rows[rows] | possible]
    row, splits = balanced_splits(*where, table.take(rows), found.rows[rows], worth)
    if problem.engine.runs.stages_alike:
        told = [less_layers(split, 1) is not None for split in splits.splits]
        own = np.array(told, dtype=np.bool_)[splits.split]
        row, splits = row[own], splits.take(own)
    if not len(splits):
        return None
    fits = peak_memory(*where, splits) <= problem.cluster.memory_bytes
    row, prices = rows[row[fits]], price(*where, splits.take(fits))
    before = np.where(found.rows[row], price(*where, table.take(row)).step_time_s, np.inf)
    first = first_of_each(row, prices.step_time_s)
    return prices.take(first[prices.step_time_s[first] < before[first]])
