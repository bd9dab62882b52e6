"""When PyTorch posts messages between pipeline stages, in turns of a walk through what all ranks do: passes,
and what their stages do before and after these."""

from __future__ import annotations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, GATHERED_STAGES, INPUTS, WEIGHTS, Order, orders
from costmodels.spec.table import Bools, Ints

NEVER = -1


@dataclass(frozen=True, eq=False)
class Timed:
    """The passes of one rank and when its messages come; times are turns of the walk, by rank in each."""

    kind: Ints
    stage: Ints
    micro_batch: Ints
    time: Ints
    inputs: dict[int, Ints]
    """Sorted times at which inputs of each stage here come; empty where none come from another rank."""
    gradients: dict[int, Ints]
    """The same of gradients of results."""
    turn: int
    """Between two turns of a rank."""


def message_times(
    schedule: Schedule, stages: Ints, micro_batches: int, awaits_reductions: bool
) -> list[Timed]:
    """The passes of each rank of a schedule.

    A pass has its turn after the one before it and once its message is there; ranks take turns in their order
    (`_add_send_recv` in `torch.distributed.pipelining.schedules`).

    Args:
        stages: of each rank, [pipeline, chunks].
        awaits_reductions: as PyTorch from 2.15 on, which takes a turn of its own.

    Raises:
        InputError: the schedule does not run this number of micro batches.
    """
    pipeline, last = len(stages), stages.size - 1
    every = orders(schedule, pipeline, stages.shape[1], micro_batches)
    rank_of = dict(
        zip(stages.ravel().tolist(), np.repeat(np.arange(pipeline), stages.shape[1]).tolist(), strict=True)
    )
    # Results of all stages and micro batches, their gradients, and a place for what nobody waits for.
    count = stages.size * micro_batches
    sent = [NEVER] * (2 * count + 1)
    starts = [_together(schedule, one, rank == pipeline - 1) for rank, one in enumerate(every)]
    todo = [_messages(one, start, last, micro_batches) for one, start in zip(every, starts, strict=True)]
    pauses = [
        _pauses(one, stages[rank], micro_batches, start, awaits_reductions)
        for rank, (one, start) in enumerate(zip(every, starts, strict=True))
    ]
    at, turn = [0] * pipeline, [0] * pipeline
    times: list[list[int]] = [[] for _ in todo]
    moved = True
    while moved:
        moved = False
        for rank, passes in enumerate(todo):
            here, own, pause = at[rank], times[rank], pauses[rank]
            while here < len(passes):
                first, second, gives, also_gives = passes[here]
                time = turn[rank] + pause[here]
                if first >= 0:
                    given = sent[first]
                    if given == NEVER:
                        break
                    # In the same turn if the sender comes before in it.
                    time = max(time, given // pipeline + (given % pipeline >= rank))
                if second >= 0:
                    given = sent[second]
                    if given == NEVER:
                        break
                    time = max(time, given // pipeline + (given % pipeline >= rank))
                turn[rank] = time + 1
                time = time * pipeline + rank
                sent[gives] = sent[also_gives] = time
                own.append(time)
                here += 1
            moved = moved or here > at[rank]
            at[rank] = here
    results, gradients = (
        np.array(some).reshape(-1, micro_batches) for some in (sent[:count], sent[count:-1])
    )

    def of(given: Ints, stage: int, neighbour: int) -> Ints:
        if not 0 <= neighbour <= last or rank_of[neighbour] == rank_of[stage]:
            return np.zeros(0, dtype=np.int64)
        result: Ints = np.sort(given[neighbour])
        return result

    return [
        Timed(
            kind=one.kind,
            stage=one.stage,
            micro_batch=one.micro_batch,
            time=np.repeat(
                np.array(times[rank], dtype=np.int64), np.diff(starts[rank], append=len(one.kind))
            ),
            inputs={stage: of(results, stage, stage - 1) for stage in stages[rank].tolist()},
            gradients={stage: of(gradients, stage, stage + 1) for stage in stages[rank].tolist()},
            turn=pipeline,
        )
        for rank, one in enumerate(every)
    ]


def next_passes(is_own: Bools) -> Ints:
    """The next pass of each stage at each pass, [passes, chunks]; the number of passes where none comes.

    Args:
        is_own: the stage of each pass, [passes, chunks].
    """
    count = len(is_own)
    result: Ints = np.where(is_own, np.arange(count)[:, None], count)
    return np.minimum.accumulate(result[::-1], axis=0)[::-1]


def resident(is_own: Bools) -> Ints:
    """1 for the stages whose parameters are gathered: those that come next, at each pass.

    Args:
        is_own: as `next_passes` takes it.
    """
    upcoming = next_passes(is_own)
    place = upcoming.argsort(axis=1, kind="stable").argsort(axis=1)
    result: Ints = ((place < GATHERED_STAGES) & (upcoming < len(is_own))).astype(np.int64)
    return result


def _pauses(
    order: Order, stages: Ints, micro_batches: int, starts: Ints, awaits_reductions: bool
) -> list[int]:
    """Turns before each of a rank's passes that go to gathering and freeing parameters, and to reducing the
    gradients of stages that are done.

    Args:
        starts: the first ones of passes that have their turns together.
    """
    is_own = order.stage[:, None] == stages
    gathered = resident(is_own)
    changed = np.abs(np.diff(gathered, axis=0, prepend=0)).sum(axis=1)
    ends = is_own & np.isin(order.kind, (BACKWARD, WEIGHTS))[:, None]
    reduced = (is_own & ends & (ends.cumsum(axis=0) == micro_batches)).any(axis=1)
    # To begin, and perhaps to await it.
    after = reduced * (1 + awaits_reductions)
    turns = changed + np.concatenate([[0], after[:-1]])
    result: list[int] = np.add.reduceat(turns, starts).tolist()
    return result


def _together(schedule: Schedule, order: Order, is_last: bool) -> Ints:
    """The first ones of passes whose messages travel together.

    In DualPipeV these are a forward pass and the whole backward pass after it, save the last rank's first.
    """
    follows = np.zeros(len(order.kind), dtype=np.bool_)
    if schedule == "dualpipev":
        follows[1:] = (order.kind[1:] == BACKWARD) & (order.kind[:-1] == FORWARD)
        if is_last and follows.any():
            follows[follows.argmax()] = False
    result: Ints = np.flatnonzero(~follows)
    return result


def _messages(order: Order, starts: Ints, last: int, micro_batches: int) -> list[list[int]]:
    """Of one or two passes that have their turns together: the messages that they wait for, and those that
    they give, [groups, 4]; messages are numbered by stage and micro batch, gradients after results."""
    kind, stage, number = order.kind, order.stage, order.micro_batch
    count = (last + 1) * micro_batches
    own = stage * micro_batches + number
    forward, backward = kind == FORWARD, (kind == BACKWARD) | (kind == INPUTS)
    waits = np.where(forward & (stage > 0), own - micro_batches, NEVER)
    waits = np.where(backward & (stage < last), count + own + micro_batches, waits)
    gives = np.where(forward, own, np.where(backward, count + own, 2 * count))
    ends = np.append(starts[1:], len(kind)) - 1
    second = np.where(ends > starts, waits[ends], NEVER)
    result: list[list[int]] = np.stack([waits[starts], second, gives[starts], gives[ends]], axis=1).tolist()
    return result
