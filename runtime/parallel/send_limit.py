"""A limit of concurrent messages of a pipeline rank, which waits for earlier ones before it sends more.

PyTorch has this limit since 2.15 (`_add_wait_send_budget` in `torch.distributed.pipelining.schedules`). It
walks the whole graph of sends and receives for each message that may be waited for, which takes a minute or
more for ten stages on a rank. Vector clocks find the same waits here in less than a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.pipelining import schedules

from costmodels.spec.send_order import Place, SendOrder

# Any: private, and not in all versions.
_schedules: Any = schedules

SENDS = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
"""The receiving action of each send, and its distance in stages."""

RECEIVES = [receive for receive, _ in SENDS.values()]

Message = tuple[str, int, int]
"""The name of an action, its stage and its microbatch."""


def keeps_messages() -> bool:
    """Return whether this version of PyTorch keeps messages until an action waits for their send."""
    return hasattr(_schedules, "_add_wait_send_budget")


def limit_sends(
    actions: Mapping[int, list[Any]], rank_of: Callable[[int], int], most: int
) -> dict[int, list[Any]]:
    """PyTorch's actions of each rank, including communication, with earlier waits for sends where needed.

    Args:
        rank_of: the rank of a stage.
        most: most concurrent messages of a rank.

    Raises:
        RuntimeError: no send could be waited for before the next one.
    """
    order = SendOrder(len(actions))
    places = _placed(actions, rank_of, order)
    return {rank: _limited(rank, own, most, places, order) for rank, own in sorted(actions.items())}


def _limited(
    rank: int, actions: list[Any], most: int, places: dict[Message, Place], order: SendOrder
) -> list[Any]:
    waits = {_wait_of(action): action for action in actions if _message_of(action)[0] in SENDS}
    # Sends under way, by their receives.
    pending: dict[Place, Any] = {}
    result: list[Any] = []
    for action in actions:
        message = _message_of(action)
        if message[0] in SENDS:
            while len(pending) >= most:
                done = order.first_done(pending, places[message])
                if done is None:
                    raise RuntimeError(f"pipeline rank {rank} cannot do with {most} sends under way")
                result.append(_wait_of(pending.pop(done)))
            pending[places[_peer_of(message)]] = action
        elif action in waits:
            receive = places[_peer_of(_message_of(waits[action]))]
            if receive not in pending:
                # Awaited before.
                continue
            del pending[receive]
        result.append(action)
    return result


def _placed(
    actions: Mapping[int, list[Any]], rank_of: Callable[[int], int], order: SendOrder
) -> dict[Message, Place]:
    """Order all sends and receives, with each receive after its send.

    PyTorch's own waits add no order: they come after the peer's answer, or at the end of the step.
    """
    left = {rank: deque(map(_message_of, own)) for rank, own in actions.items()}
    places: dict[Message, Place] = {}
    # Receives whose sends have their place.
    sent: dict[Message, Place] = {}
    todo = deque(sorted(left))
    while todo:
        rank = todo.popleft()
        own = left[rank]
        while own:
            message = own[0]
            if message[0] in SENDS:
                place = places[message] = order.append(rank)
                peer = _peer_of(message)
                sent[peer] = place
                todo.append(rank_of(peer[1]))
            elif message[0] in RECEIVES:
                if message not in sent:
                    break
                places[message] = order.append(rank, sent[message])
            own.popleft()
    return places


def _message_of(action: Any) -> Message:
    """The message that an action sends or receives."""
    return action.computation_type.value, action.stage_index, action.microbatch_index


def _peer_of(send: Message) -> Message:
    """The action that receives a sent message."""
    name, stage, number = send
    receive, further = SENDS[name]
    return receive, stage + further, number


def _wait_of(send: Any) -> Any:
    """The action that waits for a send."""
    kind = getattr(_schedules, f"WAIT_{send.computation_type.value}")
    return _schedules._Action(send.stage_index, kind, send.microbatch_index)
