"""Which sends a pipeline rank awaits before it begins another one.

PyTorch from 2.15 on keeps what is sent until it awaits that: results after the backward of their stage,
gradients at the end of the step, or earlier where a rank would have more than `SENDS_OF_STAGE` messages of
each of its stages under way (`_add_wait_send_budget` in `torch.distributed.pipelining.schedules`).
"""

from __future__ import annotations

import numpy as np

from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS
from costmodels.spec.send_order import SENDS_OF_STAGE, ChainOrder, Place, SendOrder
from costmodels.spec.table import Bools, Ints
from costmodels.tapes.player.message_times import NEVER, Timed

RESULTS, GRADIENTS = range(2)
"""Kinds of messages: results of forward passes, and gradients of inputs."""


def awaited_sends(every: list[Timed], stages: tuple[tuple[int, ...], ...], micro_batches: int) -> Ints:
    """Before which other send a rank awaits each: its place in the flattened result, or `NEVER`,
    [kinds of messages, stages, micro batches].

    Args:
        every: the passes of each rank.
        stages: of each rank.
    """
    rank_of = np.empty(sum(map(len, stages)), dtype=np.int64)
    for rank, own in enumerate(stages):
        rank_of[list(own)] = rank
    # When the gradients of inputs are there, by stage and micro batch: no later send awaits its result.
    returned = np.empty((len(rank_of), micro_batches), dtype=np.int64)
    parts = []
    for rank, timed in enumerate(every):
        backward = (timed.kind == BACKWARD) | (timed.kind == INPUTS)
        returned[timed.stage[backward], timed.micro_batch[backward]] = np.flatnonzero(backward)
        parts.append(_sends(timed, backward, rank))
    time, place, last, kind, stage, number, sender = map(np.concatenate, zip(*parts, strict=True))
    in_turn = np.lexsort((place, time))
    last, kind, stage, number, sender = (each[in_turn] for each in (last, kind, stage, number, sender))
    receiver = rank_of[np.where(kind == RESULTS, stage + 1, stage - 1)]
    order = (ChainOrder if np.abs(np.diff(rank_of)).max(initial=0) <= 1 else SendOrder)(len(every))
    sent, received = order.append_messages(sender, receiver)
    ends = np.where(kind == RESULTS, returned[stage, number], np.iinfo(np.int64).max)
    message = (kind * len(rank_of) + stage) * micro_batches + number
    found = np.full((2, len(rank_of), micro_batches), NEVER)
    for rank, chunks in enumerate(stages):
        rows = np.flatnonzero(sender == rank)
        over = np.maximum(np.searchsorted(last[rows], ends[rows]), np.arange(len(rows)) + 1)
        places = [sent[row] for row in rows.tolist()], [received[row] for row in rows.tolist()]
        awaited, before = _awaited(order, *places, over, SENDS_OF_STAGE * len(chunks))
        found.ravel()[message[rows[awaited]]] = message[rows[before]]
    return found


def _awaited(
    order: SendOrder, sent: list[Place], received: list[Place], over: Ints, most: int
) -> tuple[list[int], list[int]]:
    """Sends of a rank that it awaits, and before which others of its sends, by their numbers.

    Args:
        over: the first send before which each needs no waiting any more.
        most: sends that may be under way.
    """
    awaited: list[int] = []
    before: list[int] = []
    # Receives of what is under way, oldest first.
    pending: dict[Place, int] = {}
    ending = np.argsort(over, kind="stable")
    ends = iter(zip(over[ending].tolist(), ending.tolist(), strict=True))
    end, ended = next(ends, (len(sent), 0))
    for number, place in enumerate(sent):
        while end <= number:
            pending.pop(received[ended], None)
            end, ended = next(ends, (len(sent), 0))
        while len(pending) >= most:
            done = order.first_done(pending, place)
            awaited.append(pending.pop(next(iter(pending)) if done is None else done))
            before.append(number)
        pending[received[number]] = number
    return awaited, before


def _sends(timed: Timed, backward: Bools, rank: int) -> tuple[Ints, ...]:
    """What a rank sends to others, in order: times, passes, the last passes that have their turn with these,
    kinds, stages, micro batches, and the rank."""
    leaves = np.zeros(len(timed.kind), dtype=np.bool_)
    for passes, messages in ((timed.kind == FORWARD, timed.gradients), (backward, timed.inputs)):
        leaves |= passes & np.isin(timed.stage, [stage for stage, times in messages.items() if len(times)])
    there = np.flatnonzero(leaves)
    last = np.searchsorted(timed.time, timed.time[there], side="right") - 1
    kind = np.where(timed.kind[there] == FORWARD, RESULTS, GRADIENTS)
    sender = np.full(len(there), rank)
    return timed.time[there], there, last, kind, timed.stage[there], timed.micro_batch[there], sender
