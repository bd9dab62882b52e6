"""What a pipeline rank with several stages does: the actions of `torch.distributed.pipelining.schedules`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS
from costmodels.spec.table import Bools, Ints
from costmodels.tapes.player.message_times import Timed, message_times, next_passes, resident
from costmodels.tapes.player.sends import awaited_sends

SEND_FORWARD, SEND_BACKWARD, RECEIVE_FORWARD, RECEIVE_BACKWARD = range(4, 8)
REDUCE, AWAIT, RESHARD, UNSHARD = range(8, 12)

NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUTS: "inputs",
    WEIGHTS: "weights",
    SEND_FORWARD: "send_forward",
    SEND_BACKWARD: "send_backward",
    RECEIVE_FORWARD: "receive_forward",
    RECEIVE_BACKWARD: "receive_backward",
    REDUCE: "reduce",
    AWAIT: "await",
    RESHARD: "reshard",
    UNSHARD: "unshard",
}
"""Actions in PyTorch's words, by their numbers: passes, which have those of their kinds, messages, and what
is done to whole stages."""


@dataclass(frozen=True, eq=False)
class Actions:
    """What a rank does, in order. Arrays of shape [actions]."""

    name: Ints
    """Numbers of `NAMES`."""
    stage: Ints
    micro_batch: Ints
    """-1 of those for a whole stage."""


Stages = tuple[tuple[int, ...], ...]
"""Of each rank."""


def rank_actions(schedule: Schedule, stages: Stages, rank: int, micro_batches: int, awaits: bool) -> Actions:
    """The actions of one of the ranks that have these stages.

    Args:
        awaits: sends and reductions, as PyTorch from 2.15 on.
    """
    timed = _times(schedule, stages, micro_batches, awaits)[rank]
    return actions_of(timed, stages[rank], micro_batches, awaits)


@lru_cache(maxsize=256)
def send_waits(schedule: Schedule, stages: Stages, micro_batches: int) -> Ints:
    """`awaited_sends` of the ranks that have these stages."""
    return awaited_sends(_times(schedule, stages, micro_batches, True), stages, micro_batches)


@lru_cache(maxsize=64)
def _times(schedule: Schedule, stages: Stages, micro_batches: int, awaits: bool) -> list[Timed]:
    return message_times(schedule, np.array(stages), micro_batches, awaits)


def actions_of(timed: Timed, stages: Sequence[int], micro_batches: int, awaits: bool) -> Actions:
    """The actions of a rank with several stages, communication included, in their order.

    Those of `_add_unshard_reshard` and `_add_reduce_grad` take a turn of the rank each; a receive is where
    its sender has its turn (`_add_send_recv`).
    """
    passes = np.arange(len(timed.kind))
    is_own = timed.stage[:, None] == np.array(stages)
    chunk = is_own.argmax(axis=1)
    # In turns: what comes before the pass, the pass, and what it sends; then what others send.
    row, name, stage = _around(timed.kind, is_own, np.array(stages), micro_batches, awaits)
    turn = np.append(0, timed.time // timed.turn + 1)[row] + _number_in_row(row)
    parts = [(turn * timed.turn + timed.time[0] % timed.turn, row, name, stage, np.full(len(row), -1))]
    parts.append((timed.time, passes, timed.kind, timed.stage, timed.micro_batch))
    forward, weights = timed.kind == FORWARD, timed.kind == WEIGHTS
    # Of passes that have their turn together.
    together = np.searchsorted(timed.time, timed.time, side="right") - 1
    for sent, computed, messages in (
        (SEND_FORWARD, forward, timed.gradients),
        (SEND_BACKWARD, ~(forward | weights), timed.inputs),
    ):
        sends = np.array([len(messages[each]) > 0 for each in stages])
        own = np.flatnonzero(computed & sends[chunk])
        numbers = timed.micro_batch[own]
        parts.append((timed.time[own], together[own], np.full(len(own), sent), timed.stage[own], numbers))
    for received, messages in ((RECEIVE_FORWARD, timed.inputs), (RECEIVE_BACKWARD, timed.gradients)):
        for each, times in messages.items():
            numbers = np.arange(len(times))
            last = np.full(len(times), len(passes))
            parts.append((times, last, np.full(len(times), received), np.full(len(times), each), numbers))
    time, row, name, stage, micro_batch = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((row, time))
    return Actions(name[order], stage[order], micro_batch[order])


def _around(
    kind: Ints, is_own: Bools, own: Ints, micro_batches: int, awaits: bool
) -> tuple[Ints, Ints, Ints]:
    """What `_add_unshard_reshard` and `_add_reduce_grad` put before each pass and behind the last one: the
    passes, names and stages, in order."""
    changes = np.diff(resident(is_own), axis=0, prepend=0, append=0)
    upcoming = np.vstack([next_passes(is_own), np.zeros_like(own)])
    ends = is_own & ((kind == BACKWARD) | (kind == WEIGHTS))[:, None]
    done = np.vstack([np.zeros_like(own), ends & (ends.cumsum(axis=0) == micro_batches)])
    found: list[Ints] = []
    for name, there, place in (
        (REDUCE, done, own),
        (AWAIT, done * awaits, own),
        (RESHARD, changes < 0, own),
        # The stage that computes next first.
        (UNSHARD, changes > 0, upcoming),
    ):
        row, chunk = np.nonzero(there)
        places = np.broadcast_to(place, there.shape)[row, chunk]
        found.append(np.stack([places, np.full_like(row, name), row, chunk]))
    every = np.concatenate(found, axis=1)
    _, names, rows, chunks = every[:, np.lexsort(every[:3])]
    return rows, names, own[chunks]


def _number_in_row(row: Ints) -> Ints:
    """Of sorted rows: how many are the same before each."""
    result: Ints = np.arange(len(row)) - np.searchsorted(row, row)
    return result
