"""As few micro batches as show every state that a rank's memory passes through in a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

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

State = tuple[object, ...]


NEIGHBOURS = 2
"""Passes before and after one that tell what it finds in memory: messages come before they are needed."""


ROUNDS, SPLIT_ROUNDS, MANY_ROUNDS = 3, 4, 5
"""Least rounds of micro batches where a rank has several stages, where their backward is split, and where a
rank has more stages than it gathers at a time: which ones follows from passes further ahead."""


def enough_micro_batches(layout: Layout, pipeline_rank: int) -> int:
    """The fewest micro batches whose step passes through the same states as that of `layout`.

    Micro batches are alike, so what a rank holds around a pass follows from how many micro batches of each of
    its stages are between forward and backward, how many wait for their gradients of weights, whether
    gradients are there, which passes come shortly before and after, and whether it is a stage's last backward
    pass. Two batches whose steps pass through the same set of such states have the same peak.

    With several stages on a rank, a message may come many passes before its use, by the pace of other ranks:
    a few rounds of micro batches are taken then at least, in which all ranks come to keep pace.
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
    states = set(_states(schedule, pipeline, chunks, wanted, rank))
    for fewer in choices:
        if schedule_exists(schedule, pipeline, chunks, fewer) and states <= set(
            _states(schedule, pipeline, chunks, fewer, rank)
        ):
            return fewer
    return wanted


def fewest_micro_batches(layout: Layout) -> int:
    """The smallest step that the schedule of `layout` runs."""
    pipeline = layout.pipeline_parallel
    fewest = max(1, SCHEDULE_TRAITS[layout.schedule].least_micro_batches) * pipeline
    return min(fewest, layout.micro_batches)


@lru_cache(maxsize=32)
def _orders(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> tuple[Order, ...]:
    return orders(schedule, pipeline, chunks, micro_batches)


def _states(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, rank: int) -> Iterator[State]:
    order = _orders(schedule, pipeline, chunks, micro_batches)[rank]
    passes = list(zip(order.kind.tolist(), order.stage.tolist(), strict=True))
    stages = sorted({stage for _, stage in passes})
    splits = any(kind == WEIGHTS for kind, _ in passes)
    # Of each stage: micro batches between forward and backward, those that wait for gradients of weights, and
    # whether some are done.
    counts = dict.fromkeys(stages, (0, 0, False))
    done = dict.fromkeys(stages, 0)
    for number, (kind, stage) in enumerate(passes):
        under_way, waiting, some = counts[stage]
        if kind == FORWARD:
            under_way += 1
            counts[stage] = under_way, waiting, some
        around = tuple(passes[max(0, number - NEIGHBOURS) : number + NEIGHBOURS + 1])
        yield around, tuple(counts.values()), done[stage] == micro_batches - 1
        if kind in (BACKWARD, WEIGHTS):
            done[stage] += 1
            some = True
        if kind == WEIGHTS:
            waiting -= 1
        elif kind != FORWARD:
            under_way -= 1
            waiting += splits and kind != BACKWARD
        counts[stage] = under_way, waiting, some
