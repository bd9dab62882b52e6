"""The order of sends and receives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from costmodels.spec.send_order import ChainOrder, SendOrder


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_alone_are_in_the_order_that_vector_clocks_say(seed: int) -> None:
    draw, ranks = random.Random(seed), 5
    orders = SendOrder(ranks), ChainOrder(ranks)
    pairs = []
    for _ in range(60):
        sender = draw.randrange(ranks)
        receiver = draw.choice([rank for rank in (sender - 1, sender + 1) if 0 <= rank < ranks])
        (sent, received), other = (
            (place := order.append(sender), order.append(receiver, place)) for order in orders
        )
        assert (sent, received) == other
        pairs.append((sent, received))
    added = 0
    for _ in range(40):
        # A send that follows the receive of another one of its rank, as a rank that waits for it has it.
        (first, receive), (later, _) = draw.choice(pairs), draw.choice(pairs)
        found = [order.first_done([receive], later) for order in orders if first[0] == later[0]]
        assert len(set(found)) <= 1
        added += receive in found
        for _, received in pairs:
            for others in pairs:
                for place in others:
                    if abs(received[0] - place[0]) == 1:
                        assert len({order.is_before(received, place) for order in orders}) == 1
    assert added


@pytest.mark.parametrize("order", [SendOrder, ChainOrder])
def test_messages_together_have_the_places_and_order_of_messages_one_by_one(order: type[SendOrder]) -> None:
    draw, ranks = random.Random(0), 4
    senders = np.array([draw.randrange(ranks) for _ in range(50)])
    steps = np.array([draw.choice([-1, 1]) for _ in senders])
    receivers = np.abs(np.where(senders + steps == ranks, senders - 1, senders + steps))
    together, apart = order(ranks), order(ranks)
    sent, received = together.append_messages(senders, receivers)
    for number, (sender, receiver) in enumerate(zip(senders.tolist(), receivers.tolist(), strict=True)):
        assert sent[number] == (place := apart.append(sender))
        assert received[number] == apart.append(receiver, place)
    for one in sent:
        for other in received:
            if abs(one[0] - other[0]) <= 1 and (order is SendOrder or one[0] != other[0]):
                assert together.is_before(one, other) == apart.is_before(one, other)
                assert together.is_before(other, one) == apart.is_before(other, one)
