"""Offloading, the last resort: it is searched when nothing fits into the memory of the devices alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from costmodels.memory.host import host_bytes
from costmodels.pricing import Prices
from costmodels.spec.table import NONE, Bools, LayoutTable
from planner.problem import Problem
from planner.solve.concatenation import concatenate_tables
from planner.solve.recompute import recompute_kinds, with_most_recompute
from planner.space.grid import Space
from planner.space.grid_table import Places

OFFLOADS: tuple[dict[str, bool], ...] = (
    {"offload_activations": True},
    {"offload_optimizer": True},
    {"offload_activations": True, "offload_optimizer": True},
)
"""Combinations of offloading: one of the two kinds, or both; both may leave memory for less recomputation."""

HOST_MEMORY = "host_memory"
"""Name of the rule that counts layouts whose offloaded bytes exceed host memory."""

OFFLOAD_REASON = "nothing fits without offloading; "
"""The beginning of the reason of a plan that offloads because nothing else fits."""


def offload_space(problem: Problem, space: Space) -> tuple[list[Problem], Space, Space] | None:
    """The problem with offloading pinned, the layouts of `space` and those that offload, and the layouts that
    need recomputation (`overfull_host`).

    None where pins decide offloading, or where the device is its own host.
    """
    if problem.cluster.device.kind == "cpu":
        return None
    fixed = {name: value for name, value in problem.pins.items() if name in OFFLOADS[-1]}
    left = [
        {**offloaded, **fixed}
        for offloaded in OFFLOADS
        if not offloaded.keys() & fixed.keys()
        or (len(offloaded) == 1 and not offloaded.keys() <= fixed.keys())
    ]
    pinned = [replace(problem, pins={**problem.pins, **offloaded}) for offloaded in left]
    if not pinned:
        return None
    spaces = [each.space() for each in pinned]
    held = [within_host(problem, each) for each in spaces]
    within = union([space, *(each for each in held if len(each.table))])
    return pinned, within, union([overfull_host(problem, each) for each in spaces])


def within_host(problem: Problem, space: Space) -> Space:
    """`space` without the layouts whose offloaded bytes exceed their share of host memory."""
    held = _fits_host(problem, space.table)
    if held.all():
        return space
    return replace(
        space.take(np.flatnonzero(held)),
        illegal={**space.illegal, HOST_MEMORY: len(held) - int(np.count_nonzero(held))},
    )


def overfull_host(problem: Problem, space: Space) -> Space:
    """Layouts of `space` without recomputation whose offloaded bytes exceed host memory.

    They are not legal answers, but recomputation is solved for them.
    """
    table = space.table
    kinds = recompute_kinds(problem.pins, problem.engine)
    plain = table.offload_activations & (table.recompute == NONE) & bool(kinds)
    plain = plain & ~_fits_host(problem, table) if plain.any() else plain
    rows = np.flatnonzero(plain)
    most = with_most_recompute(problem.model, problem.engine, table.take(rows), kinds)
    plain[rows] = _fits_host(problem, most)
    return space.take(np.flatnonzero(plain))


def solved_within_host(problem: Problem, solved: Sequence[Prices]) -> list[Prices]:
    """Prices without the layouts whose offloaded bytes exceed their share of host memory."""
    kept = [
        some.take(_fits_host(problem, some.table))
        if some.table.offload_optimizer.any() or some.table.offload_activations.any()
        else some
        for some in solved
    ]
    return [some for some in kept if len(some)]


def _fits_host(problem: Problem, table: LayoutTable) -> Bools:
    device = problem.cluster.device
    held = host_bytes(problem.model, problem.engine.for_device(device), table)
    result: Bools = held <= device.host_memory_bytes
    return result


def union(spaces: Sequence[Space]) -> Space:
    """The layouts of all spaces, in order."""
    return Space(
        table=concatenate_tables([space.table for space in spaces]),
        states=_apart([space.states for space in spaces]),
        work=_apart([space.work for space in spaces]),
        considered=sum(space.considered for space in spaces),
        illegal={
            rule: sum(space.illegal.get(rule, 0) for space in spaces)
            for rule in dict.fromkeys(rule for space in spaces for rule in space.illegal)
        },
        has_reserve=any(space.has_reserve for space in spaces),
    )


def _apart(numbers: Sequence[Places]) -> Places:
    """The numbers of all arrays in order, shifted so that the numbers of each array exceed those before
    it."""
    starts = accumulate((int(some.max(initial=-1)) + 1 for some in numbers), initial=0)
    return np.concatenate([some + start for some, start in zip(numbers, starts, strict=False)])
