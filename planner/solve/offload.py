"""Offloading, the last resort: what is searched when nothing fits into the memory of the devices alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from costmodels.memory.host import host_bytes
from planner.problem import Problem
from planner.solve.concatenation import concatenate_tables
from planner.space.grid import Space
from planner.space.grid_table import Places

OFFLOADS: tuple[tuple[dict[str, bool], ...], ...] = (
    ({"offload_activations": True}, {"offload_optimizer": True}),
    ({"offload_activations": True, "offload_optimizer": True},),
)
"""What is offloaded, in turn: one of the two, then both."""

HOST_MEMORY = "host_memory"
"""Name of the rule that counts layouts which would offload more than the host holds."""

OFFLOAD_REASON = "nothing fits without offloading; "
"""What the reason of a plan begins with that offloads because nothing else fits."""


def offload_spaces(problem: Problem, space: Space) -> Iterator[Space]:
    """`space` with further layouts, which offload; none where pins decide that, or the device is its host."""
    if problem.cluster.device.kind == "cpu":
        return
    for resort in OFFLOADS:
        further = [
            replace(problem, pins={**problem.pins, **offloaded}).space()
            for offloaded in resort
            if not offloaded.keys() & problem.pins.keys()
        ]
        further = [_within_host(problem, other) for other in further if len(other.table)]
        if further:
            yield union([space, *further])


def _within_host(problem: Problem, space: Space) -> Space:
    """`space` without the layouts whose share of the host's memory is too small for what they keep there."""
    device = problem.cluster.device
    held = host_bytes(problem.model, problem.engine.for_device(device), space.table)
    rows = np.flatnonzero(held <= device.host_memory_bytes)
    if len(rows) == len(held):
        return space
    return replace(
        space,
        table=space.table.take(rows),
        family=space.family[rows],
        states=space.states[rows],
        work=space.work[rows],
        illegal={**space.illegal, HOST_MEMORY: len(held) - len(rows)},
    )


def union(spaces: Sequence[Space]) -> Space:
    """The layouts of all spaces, in order."""
    return Space(
        table=concatenate_tables([space.table for space in spaces]),
        family=_apart([space.family for space in spaces]),
        states=_apart([space.states for space in spaces]),
        work=_apart([space.work for space in spaces]),
        considered=sum(space.considered for space in spaces),
        illegal={
            rule: sum(space.illegal.get(rule, 0) for space in spaces)
            for rule in dict.fromkeys(rule for space in spaces for rule in space.illegal)
        },
    )


def _apart(numbers: Sequence[Places]) -> Places:
    """All numbers in order, those of each array beyond the ones before it."""
    starts = accumulate((int(some.max(initial=-1)) + 1 for some in numbers), initial=0)
    return np.concatenate([some + start for some, start in zip(numbers, starts, strict=False)])
