"""Which sends a pipeline rank awaits before it begins another one.

PyTorch from 2.15 on keeps what is sent until it awaits that: results after the backward of their stage,
gradients at the end of the step, or earlier where a rank would have more than `SENDS_OF_STAGE` messages of
each of its stages under way (`_add_wait_send_budget` in `torch.distributed.pipelining.schedules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS
from costmodels.spec.send_order import SENDS_OF_STAGE, ChainOrder, Place, SendOrder
from costmodels.tapes.player.message_times import Timed


class Send(NamedTuple):
    """A message of one micro batch."""

    is_result: bool
    """Of a forward pass; else the gradient of an input."""
    stage: int
    micro_batch: int


class _Turn(NamedTuple):
    """When something is sent: in time, after a pass of its rank, and after those together with that."""

    time: int
    place: int
    last: int


def awaited_sends(every: list[Timed], stages: tuple[tuple[int, ...], ...]) -> list[dict[Send, Send]]:
    """Of each rank, sends that it awaits, and before which other one.

    Args:
        stages: of each rank.
    """
    rank_of = {stage: rank for rank, own in enumerate(stages) for stage in own}
    hops = [abs(rank_of[stage] - rank_of[stage + 1]) for stage in range(len(rank_of) - 1)]
    order = (ChainOrder if max(hops, default=0) <= 1 else SendOrder)(len(every))
    places: list[list[tuple[Send, _Turn, Place]]] = [[] for _ in every]
    receive: dict[Send, Place] = {}
    backward = [_backward(timed) for timed in every]
    turns = sorted((turn, rank, send) for rank, timed in enumerate(every) for send, turn in _sends(timed))
    for turn, rank, send in turns:
        place = order.append(rank)
        places[rank].append((send, turn, place))
        receive[send] = order.append(rank_of[send.stage + 1 if send.is_result else send.stage - 1], place)
    found = []
    for rank, own in enumerate(places):
        awaited: dict[Send, Send] = {}
        # By their receives.
        pending: dict[Place, Send] = {}
        most = SENDS_OF_STAGE * len(stages[rank])
        for send, turn, place in own:
            if len(pending) >= most:
                pending = {
                    key: one
                    for key, one in pending.items()
                    if not one.is_result or backward[rank][one.stage, one.micro_batch] > turn.last
                }
            while len(pending) >= most:
                done = order.first_done(pending, place)
                awaited[pending.pop(next(iter(pending)) if done is None else done)] = send
            pending[receive[send]] = send
        found.append(awaited)
    return found


def _backward(timed: Timed) -> dict[tuple[int, int], int]:
    """Places of the passes that make the gradients of inputs, by stage and micro batch."""
    passes = zip(timed.kind.tolist(), timed.stage.tolist(), timed.micro_batch.tolist(), strict=True)
    return {
        (stage, number): place
        for place, (kind, stage, number) in enumerate(passes)
        if kind in (BACKWARD, INPUTS)
    }


def _sends(timed: Timed) -> Iterator[tuple[Send, _Turn]]:
    """What a rank sends to others."""
    times = timed.time.tolist()
    last = (timed.time.searchsorted(timed.time, side="right") - 1).tolist()
    passes = zip(timed.kind.tolist(), timed.stage.tolist(), timed.micro_batch.tolist(), strict=True)
    for place, (kind, stage, number) in enumerate(passes):
        is_result = kind == FORWARD
        messages = timed.gradients if is_result else timed.inputs
        if (is_result or kind in (BACKWARD, INPUTS)) and len(messages[stage]):
            yield Send(is_result, stage, number), _Turn(times[place], place, last[place])
