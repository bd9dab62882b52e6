"""Ranking: the legal layouts of a problem, priced and in order."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from costmodels.pricing import price
from planner.objective import logarithms
from planner.problem import Problem
from planner.ranking.contenders import Tail, contenders, first_prices
from planner.ranking.first_plans import EXACT_PLACES, Ranking, order, settle
from planner.ranking.result import SearchResult
from planner.solve.bounds import floor_of
from planner.solve.concatenation import concatenate_prices
from planner.solve.fit import Fit, fit
from planner.solve.offload import offload_spaces
from planner.solve.solutions import solutions
from planner.space.grid import Space


def rank(
    problem: Problem, space: Space, started: float, offload: bool = False, count: int = EXACT_PLACES
) -> SearchResult:
    """Price and order the legal layouts of a problem, of which there must be one at least: the first ones at
    once, those far behind when they are asked for (`planner.ranking.contenders`).

    `started` is the reading of `time.perf_counter` from which `elapsed_s` counts. With `offload`, layouts
    that offload activations or the optimizer are searched too where nothing fits without. The first `count`
    places are settled (`SearchResult.settle`).
    """
    model, cluster, engine = problem.model, problem.cluster, problem.constants
    found, alone = _fit(problem, space), space
    if offload and not found.rows.any():
        for space in offload_spaces(problem, alone):
            found = _fit(problem, space)
            if found.rows.any():
                break
    every = np.flatnonzero(found.rows)
    # Most layouts of a large model do not fit, and most of the others take so long that nobody asks how long.
    floor = floor_of(model, cluster, engine, space, problem.objective)
    rows = contenders(problem, space, every, floor)
    prices = price(model, cluster, engine, space.table.take(rows))
    further = solutions(problem, space, found, floor, prices)
    if len(rows) < len(every):
        first = first_prices(problem.objective, prices)
        rows, prices = rows[first], prices.take(first)
    behind = every[~np.isin(every, rows)]
    prices = concatenate_prices([prices, *further])
    added = len(prices) - len(rows)
    places = order(prices.table, np.arange(len(prices)), *logarithms(problem.objective, prices))
    tail = Tail(space.table, behind) if len(behind) else None
    ranking = settle(Ranking(problem.objective, prices, places, tail=tail), count)
    if offload and len(every) and not len(ranking):
        # What seemed to fit does not: the last resorts after all.
        for resort in offload_spaces(problem, alone):
            result = rank(problem, resort, started, count=count)
            if result.feasible:
                return replace(result, offloads=True)
    return SearchResult(
        problem=problem,
        considered=space.considered + added,
        legal=len(space.table) + added,
        illegal=dict(space.illegal),
        elapsed_s=time.perf_counter() - started,
        tables=(space.table, *(some.table for some in further)),
        ranking=ranking,
        rows=np.concatenate([rows, len(space.table) + np.arange(added), behind]),
        solutions=added,
        offloads=len(ranking) > 0 and space is not alone,
    )


def _fit(problem: Problem, space: Space) -> Fit:
    where = problem.model, problem.cluster, problem.constants
    if problem.cluster.parts:
        from planner.solve.mixed_nodes import fit_of_kinds  # Few clusters have nodes of two kinds.

        return fit_of_kinds(*where, space.table)
    return fit(*where, space)
