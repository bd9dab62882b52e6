"""Ranking: the legal layouts of a problem, priced and in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels.errors import InputError
from costmodels.pricing import Prices, price
from costmodels.spec.table import Floats
from planner.objective import logarithms
from planner.problem import Problem
from planner.ranking.contenders import Tail, contenders, first_prices
from planner.ranking.first_plans import Ranked, Ranking, order, simulated, with_moved_layers
from planner.ranking.preferred import preferred_first
from planner.ranking.result import Listed, SearchResult
from planner.solve.bounds import Floor, Worth, floor_of
from planner.solve.chunk_splits import NEAR, has_movable_layers
from planner.solve.concatenation import concatenate_prices, without_repeats
from planner.solve.fit import Fit, fit
from planner.solve.further import Which, further_space, lists_plain_alone
from planner.solve.graphs import graph_problem, with_worthy_graphs
from planner.solve.offload import offload_space, overfull_host, solved_within_host, within_host
from planner.solve.pace import least_pace
from planner.solve.solutions import solutions, worth_among, worth_of_further
from planner.space.grid import Space


def rank(
    problem: Problem,
    space: Space,
    started: float,
    offload: bool = False,
    known: Listed | None = None,
) -> SearchResult:
    """Price and order the legal layouts of a problem. The first ones are priced at once, those far behind
    when they are asked for (`planner.ranking.contenders`). At least one layout must be legal.

    `started` is the reading of `time.perf_counter` from which `elapsed_s` counts. With `offload`, layouts
    that offload activations or the optimizer are searched too where nothing fits without. `known` are the
    same layouts on devices with another memory, or on other links.
    """
    result = _ranked(problem, [problem], space, started, known)
    if offload and not result.feasible:
        resort = offload_space(problem, space)
        if resort is not None:
            every, listed, overfull = resort
            result = _ranked(problem, every, listed, started, overfull=overfull)
            return replace(result, offloads=result.feasible > 0)
    return result


def _ranked(
    problem: Problem,
    pinned: Sequence[Problem],
    space: Space,
    started: float,
    known: Listed | None = None,
    overfull: Space | None = None,
) -> SearchResult:
    """Rank the layouts of one space.

    Args:
        pinned: the problem that `space` enumerates: the original one, or the same with offloading pinned.
        overfull: layouts that fit into host memory only if they recompute.
    """
    model, cluster, engine = problem.model, problem.cluster, problem.constants
    found = fit_of(problem, space, None if known is None else known.peaks)
    every = np.flatnonzero(found.rows)
    # Most layouts of a large model do not fit, and most of the others take so long that nobody asks how long.
    floor = floor_of(model, cluster, engine, space, problem.objective)
    rows, prices = contenders(problem, space, every, floor)
    added = solved_within_host(problem, solutions(problem, space, found, floor, prices))
    if overfull is not None:
        added += _recomputing(problem, overfull, [prices, *added], plain_alone=False)
    for one in pinned:
        added += _further(one, space, found, [prices, *added])
    if len(rows) < len(every):
        first = first_prices(problem.objective, prices)
        rows, prices = rows[first], prices.take(first)
    # Solving may end at a layout that is listed.
    added = without_repeats([*added, *_with_graphs(problem, started)], prices)
    behind = every[~np.isin(every, rows)]
    prices = concatenate_prices([prices, *added])
    more = len(prices) - len(rows)
    places = order(prices.table, np.arange(len(prices)), *logarithms(problem.objective, prices))
    tail = Tail(space.table, behind) if len(behind) else None
    ranking = simulated(Ranking(problem.objective, prices, places, tail))
    rows = np.concatenate([rows, len(space.table) + np.arange(more), behind])
    chosen = with_moved_layers(problem, Ranked(ranking, rows, len(space.table) + more))
    chosen = preferred_first(problem, space, found, floor, chosen)
    more = chosen.legal - len(space.table)
    added += chosen.added
    return SearchResult(
        problem=problem,
        considered=space.considered + more,
        legal=len(space.table) + more,
        illegal=dict(space.illegal),
        elapsed_s=time.perf_counter() - started,
        tables=(space.table, *(some.table for some in added)),
        ranking=chosen.ranking,
        rows=chosen.rows,
        solutions=more,
        listed=Listed(space, found.peaks),
    )


def _with_graphs(problem: Problem, started: float) -> list[Prices]:
    """Prices of layouts that gain from CUDA graphs (`planner.solve.graphs`), found by a separate search."""
    pinned = graph_problem(problem)
    if pinned is None:
        return []
    try:
        space = pinned.space()
    except InputError:
        # Pins that the world size cannot have together.
        return []
    if not len(space.table):
        return []
    found = with_worthy_graphs(problem, _ranked(pinned, [pinned], space, started).ranking.prices)
    return [found] if len(found) else []


def _further(problem: Problem, listed: Space, found: Fit, known: list[Prices]) -> list[Prices]:
    """Prices of layouts that `listed` does not have (`planner.solve.further`), if they fit and could be among
    the first, and of layouts solved from them.

    Args:
        found: the listed layouts that fit.
        known: prices of layouts that fit.
    """
    model, cluster, engine = problem.model, problem.cluster, problem.constants
    added: list[Prices] = []
    plain_alone = lists_plain_alone(problem)
    # Plans found with the enumerated microbatches leave fewer of the others to look at.
    every: tuple[Which, ...] = ("small", "usual", "fewest", "other")
    for which in every:
        so_far = [part for part in (*known, *added) if len(part)]
        if bool(so_far) is (which == "small"):
            continue
        worth = worth_of_further(problem.objective, so_far)
        space = further_space(problem, listed, found, worth, which)
        if space is None:
            continue
        if problem.pins.get("offload_activations") or problem.pins.get("offload_optimizer"):
            added += _recomputing(problem, overfull_host(problem, space), so_far, plain_alone)
            space = within_host(problem, space)
        floor = floor_of(model, cluster, engine, space, problem.objective)
        space, fits, floor = _promising(problem, space, floor, worth_among(problem.objective, so_far))
        rows = floor.rows_below(np.flatnonzero(fits.rows), worth.last)
        prices = price(model, cluster, engine, space.table.take(rows))
        solved = solved_within_host(
            problem,
            solutions(problem, space, fits, floor, prices, so_far, plain_alone),
        )
        prices = prices.take(worth(prices.table, prices.step_time_s))
        added += [part for part in (prices, *solved) if len(part)]
    return added


def _promising(problem: Problem, space: Space, floor: Floor, worth: Worth) -> tuple[Space, Fit, Floor]:
    """The layouts of a space that are fast enough for any recomputation, which of them fit, and their floor.

    Layouts that fit may be up to `NEAR` times slower where moved layers could make them fast enough.
    """
    if problem.cluster.parts:
        return space, fit_of(problem, space), floor
    pace = least_pace(problem, space, floor, worth)
    near = np.where(has_movable_layers(problem, space.table), NEAR, 1.0) * worth.last
    rows = np.flatnonzero(pace <= near)
    found = fit_of(problem, space.take(rows))
    kept = np.flatnonzero(found.rows | (pace[rows] <= worth.last))
    space = space.take(rows[kept])
    return space, found.take(kept), replace(floor, work=space.work)


def _recomputing(problem: Problem, overfull: Space, known: list[Prices], plain_alone: bool) -> list[Prices]:
    """Prices of solved layouts whose offloaded bytes fit into host memory only with recomputation.

    Args:
        known: prices of layouts that fit.
        plain_alone: layouts that recompute are not listed.
    """
    if not len(overfull.table) or problem.cluster.parts:
        return []
    found = fit_of(problem, overfull)
    none = np.zeros(len(overfull.table), dtype=np.bool_)
    floor = floor_of(problem.model, problem.cluster, problem.constants, overfull, problem.objective)
    empty = price(problem.model, problem.cluster, problem.constants, overfull.table.take(none))
    return solved_within_host(
        problem, solutions(problem, overfull, replace(found, rows=none), floor, empty, known, plain_alone)
    )


def fit_of(problem: Problem, space: Space, known: Floats | None = None) -> Fit:
    """The layouts of a space of the problem that fit; `known` as `fit` takes it."""
    where = problem.model, problem.cluster, problem.constants
    if problem.cluster.parts:
        from planner.solve.mixed_nodes import fit_of_kinds  # Few clusters have nodes of two kinds.

        return fit_of_kinds(*where, space.table)
    return fit(*where, space, known)
