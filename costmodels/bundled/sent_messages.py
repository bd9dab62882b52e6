"""How long a pipeline rank with several stages keeps the messages that it sends.

Before PyTorch 2.15 a stage keeps what it has given until its backward, and lets go of the gradient of its
input once that is sent. Later PyTorch keeps both until their send is awaited: results after the backward of
their stage, gradients at the end of the step, or earlier where a rank would have more than `SENDS_OF_STAGE`
messages of each of its stages under way (`_add_wait_send_budget` in
`torch.distributed.pipelining.schedules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from costmodels.bundled.pytorch import is_before
from costmodels.spec.send_order import SENDS_OF_STAGE, Place, SendOrder
from costmodels.spec.table import Ints
from costmodels.tapes.player.message_times import Timed


class Send(NamedTuple):
    """A message of one micro batch."""

    is_result: bool
    """Of a forward pass; else the gradient of an input."""
    stage: int
    micro_batch: int


Awaited = dict[Send, int]
"""The pass of a rank after which it awaits each of its sends before it begins another one."""


def sent_messages(every: list[Timed], stages: Ints) -> list[Ints]:
    """Messages that each rank has given, or has got and keeps for gradients of weights, before each of its
    passes, and after the last one.

    Args:
        stages: of each rank, [pipeline, chunks].
    """
    keeps = is_before(2, 15)
    awaited: list[Awaited] = [{} for _ in every] if keeps else _awaited(every, stages)
    return [_alive(timed, own, keeps) for timed, own in zip(every, awaited, strict=True)]


def _alive(timed: Timed, awaited: Awaited, keeps: bool) -> Ints:
    """Messages at each pass of a rank."""
    count = len(timed.kind)
    change = [0] * (count + 2)
    # Passes after which a message is there, and with which it goes.
    lives: list[tuple[int, int]] = []
    for (stage, number), place in timed.forward.items():
        if len(timed.gradients[stage]):
            turn = timed.backward[stage, number]
            done = awaited.get(Send(True, stage, number), turn)
            lives.append((place, done if done < turn else timed.weights.get((stage, number), turn)))
    for (stage, number), place in timed.backward.items():
        end = timed.weights.get((stage, number), place)
        if len(timed.inputs[stage]):
            done = place if keeps else awaited.get(Send(False, stage, number), count)
            lives.append((place, max(end, done)))
        if len(timed.gradients[stage]):
            # In the first stage they come with a whole backward pass, which takes it.
            lives.append((place, end - (stage == 0)))
    for start, end in lives:
        if start < end:
            change[start + 1] += 1
            change[end + 1] -= 1
    result: Ints = np.cumsum(change)[:-1]
    return result


def _awaited(every: list[Timed], stages: Ints) -> list[Awaited]:
    """The sends of each rank that are awaited before another one."""
    rank_of = {stage: rank for rank, own in enumerate(stages.tolist()) for stage in own}
    order = SendOrder(len(every))
    sends: list[list[tuple[Send, Place]]] = [[] for _ in every]
    receive: dict[Send, Place] = {}
    for rank, send in _in_turn(every):
        place = order.append(rank)
        sends[rank].append((send, place))
        receive[send] = order.append(rank_of[send.stage + 1 if send.is_result else send.stage - 1], place)
    result = []
    for rank, timed in enumerate(every):
        own: Awaited = {}
        # By their receives.
        pending: dict[Place, Send] = {}
        for send, place in sends[rank]:
            turns = timed.forward if send.is_result else timed.backward
            now = timed.last[turns[send[1:]]]
            pending = {
                key: one for key, one in pending.items() if not one.is_result or timed.backward[one[1:]] > now
            }
            while len(pending) >= SENDS_OF_STAGE * stages.shape[1]:
                done = order.first_done(pending, place)
                own[pending.pop(next(iter(pending)) if done is None else done)] = now
            pending[receive[send]] = send
        result.append(own)
    return result


def _in_turn(every: list[Timed]) -> Iterator[tuple[int, Send]]:
    """Ranks and messages in the order in which they are given."""
    found = []
    for rank, timed in enumerate(every):
        for is_result, places, neighbours in (
            (True, timed.forward, timed.gradients),
            (False, timed.backward, timed.inputs),
        ):
            for (stage, number), place in places.items():
                if len(neighbours[stage]):
                    found.append((int(timed.time[place]), place, rank, Send(is_result, stage, number)))
    for _, _, rank, send in sorted(found):
        yield rank, send
