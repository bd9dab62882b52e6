"""The fewest microbatches that show every state of a rank's memory in a step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from costmodels import Layout
from costmodels.spec.layout import SCHEDULE_TRAITS, SPLIT_BACKWARD, Schedule
from costmodels.spec.schedules import (
    BACKWARD,
    FORWARD,
    GATHERED_STAGES,
    WEIGHTS,
    Order,
    orders,
    schedule_exists,
)
from costmodels.spec.table import Bools, Ints

NEIGHBOURS = 2
"""Number of neighbouring passes that determine the memory at a pass, as messages arrive before they are
needed."""


ROUNDS, SPLIT_ROUNDS, MANY_ROUNDS = 3, 4, 5
"""Least rounds of microbatches, for ranks with several stages, for split backward with several stages, and
for more stages than a rank gathers at a time."""


def enough_micro_batches(layout: Layout, pipeline_rank: int) -> int:
    """The fewest microbatches whose step passes through the same states as that of `layout`.

    Microbatches are alike, so the bytes that a rank holds around a pass follow from five things. These are
    the microbatches of each stage between forward and backward, and those that wait for their weight
    gradients. They are also whether gradients are there, the passes shortly before and after, and whether the
    pass is a stage's last backward pass. Two batches whose steps pass through the same set of such states
    have the same peak.

    With several stages on a rank, a message may arrive many passes before its use, depending on other ranks.
    Then at least a few rounds of microbatches are taken, until all ranks are in step.
    """
    if layout.pipeline_parallel == 1:
        # The first makes gradients, others add to them, and the last reduces them.
        return min(layout.micro_batches, 3)
    shape = layout.schedule, layout.pipeline_parallel, layout.virtual_pipeline_parallel
    return _enough(*shape, layout.micro_batches, pipeline_rank)


@lru_cache(maxsize=4096)
def _enough(schedule: Schedule, pipeline: int, chunks: int, wanted: int, rank: int) -> int:
    step, rounds = (1, 1) if schedule == "1f1b" else (pipeline, ROUNDS)
    if schedule in SPLIT_BACKWARD:
        rounds = SPLIT_ROUNDS
    if chunks > GATHERED_STAGES:
        rounds = MANY_ROUNDS
    choices = range(wanted % step + rounds * pipeline, wanted, step)
    if not choices or not schedule_exists(schedule, pipeline, chunks, wanted):
        return wanted
    states = _states(schedule, pipeline, chunks, wanted, rank)
    for fewer in choices:
        if schedule_exists(schedule, pipeline, chunks, fewer) and states <= _states(
            schedule, pipeline, chunks, fewer, rank
        ):
            return fewer
    return wanted


def fewest_micro_batches(layout: Layout) -> int:
    """The fewest microbatches that the schedule of `layout` runs."""
    pipeline = layout.pipeline_parallel
    fewest = max(1, SCHEDULE_TRAITS[layout.schedule].least_micro_batches) * pipeline
    return min(fewest, layout.micro_batches)


@lru_cache(maxsize=32)
def _orders(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> tuple[Order, ...]:
    return orders(schedule, pipeline, chunks, micro_batches)


def _states(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, rank: int) -> set[bytes]:
    order = _orders(schedule, pipeline, chunks, micro_batches)[rank]
    kind, count = order.kind, len(order.kind)
    stages, chunk = np.unique(order.stage, return_inverse=True)
    is_own = chunk[:, None] == np.arange(len(stages))
    forward, weights = (is_own & (kind == one)[:, None] for one in (FORWARD, WEIGHTS))
    ends = weights | (is_own & (kind == BACKWARD)[:, None])
    # Each pass with those around it; 0 before the first and after the last.
    numbers = np.pad(1 + kind * len(stages) + chunk, NEIGHBOURS)
    around = np.lib.stride_tricks.sliding_window_view(numbers, 2 * NEIGHBOURS + 1)
    # Numbers for each stage: microbatches between forward and backward, microbatches that wait for weight
    # gradients, and whether some are done.
    begun, done = forward.cumsum(axis=0), _before(ends)
    under_way = begun - _before(is_own & ~forward & ~weights)
    waiting = begun - done - under_way if weights.any() else np.zeros_like(begun)
    is_last = done[np.arange(count), chunk] == micro_batches - 1
    states = np.column_stack([around, under_way, waiting, done > 0, is_last])
    return set(states.view(np.dtype((np.void, states.itemsize * states.shape[1]))).ravel().tolist())


def _before(happens: Bools) -> Ints:
    """Counts of earlier events before each pass, [passes, stages]."""
    result: Ints = happens.cumsum(axis=0) - happens
    return result
