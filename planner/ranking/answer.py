"""The answer to a problem: all questions use this one search, so all name the same plan."""

from __future__ import annotations

import time

from planner.problem import Problem
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult
from planner.space.grid import Space


def answer(problem: Problem, space: Space | None = None, started: float | None = None) -> SearchResult | None:
    """The ranked legal layouts of `problem`, even if none fits; None where no layout is legal.

    Args:
        space: the problem's legal layouts, if they were enumerated before.
        started: the reading of `time.perf_counter` at the start of the search.

    Raises `InputError` when pins do not divide the world size.
    """
    started = time.perf_counter() if started is None else started
    space = problem.space() if space is None else space
    if not len(space.table):
        return None
    if problem.cluster.parts:
        from planner.ranking.mixed_nodes import rank_orders  # Few clusters have nodes of two kinds.

        return rank_orders(problem, space, started)
    return rank(problem, space, started, offload=True)
