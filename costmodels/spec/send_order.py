"""The order of sends and receives of a pipeline's ranks, and the send for which a rank waits first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from costmodels.spec.table import Ints

SENDS_OF_STAGE = 2
"""Number of concurrent messages of each stage of a rank: one forward, one backward."""

Place = tuple[int, int]
"""A rank, and the number of one of its sends and receives."""


class SendOrder:
    """A partial order of sends and receives, kept for each as a vector clock.

    A send or receive comes after the earlier ones of its rank, and after the one that it is declared to
    follow. Its clock has, for every other rank, the last place that comes before it (F. Mattern, "Virtual
    Time and Global States of Distributed Systems", 1989, section 5). A place that follows no other rank has
    the clock of the place before it.
    """

    def __init__(self, ranks: int) -> None:
        self.clocks: list[list[Ints]] = [[] for _ in range(ranks)]
        # Places that follow a place, besides the next one of its rank.
        self.after: dict[Place, list[Place]] = {}
        self.nothing: Ints = np.full(ranks, -1)

    def append(self, rank: int, follows: Place | None = None) -> Place:
        """Append the next send or receive of a rank; the one that it follows on another rank must have been
        appended before."""
        own = self.clocks[rank]
        place = rank, len(own)
        clock = own[-1] if own else self.nothing
        if follows is not None:
            clock = self._later(clock, follows)
            self.after.setdefault(follows, []).append(place)
        own.append(clock)
        return place

    def append_messages(self, senders: Ints, receivers: Ints) -> tuple[list[Place], list[Place]]:
        """Append sends, each followed by its receive on another rank; returns their places.

        Args:
            senders: the sending rank of each message, in order.
            receivers: the receiving rank of each message.
        """
        sent, received = [], []
        for sender, receiver in zip(senders.tolist(), receivers.tolist(), strict=True):
            sent.append(self.append(sender))
            received.append(self.append(receiver, sent[-1]))
        return sent, received

    def _later(self, clock: Ints, earlier: Place) -> Ints:
        """A clock that is also after a given place."""
        rank, number = earlier
        found: Ints = np.maximum(clock, self.clocks[rank][number])
        if found[rank] < number:
            found[rank] = number
        return found

    def is_before(self, earlier: Place, later: Place) -> bool:
        """Return whether one place comes before the other, or is the same."""
        (one, index), (rank, number) = earlier, later
        return index <= number if one == rank else bool(self.clocks[rank][number][one] >= index)

    def put_before(self, earlier: Place, later: Place) -> None:
        """Add the order that one place follows another; it must not come before the other already."""
        self.after.setdefault(earlier, []).append(later)
        todo = [(earlier, later)]
        while todo:
            source, (rank, number) = todo.pop()
            known = self.clocks[rank][number]
            if rank != source[0] and known[source[0]] >= source[1]:
                continue
            clock = self._later(known, source)
            # The own entry of a clock follows from the number of the place.
            clock[rank] = known[rank]
            if clock.tobytes() == known.tobytes():
                continue
            own = self.clocks[rank]
            while number < len(own) and own[number] is known:
                own[number] = clock
                todo += [((rank, number), reached) for reached in self.after.get((rank, number), ())]
                number += 1
            if number < len(own):
                todo.append(((rank, number - 1), (rank, number)))

    def first_done(self, receives: Iterable[Place], before: Place) -> Place | None:
        """The receive that completes first when a rank waits, `before` its next send, for one of its
        outstanding sends.

        It is the first receive that is already ordered before the next send, else the first one that can be;
        None if none can. From then on the next send is ordered after it. This is `_add_wait_send_budget` of
        `torch.distributed.pipelining.schedules`.
        """
        able = None
        for receive in receives:
            if self.is_before(receive, before):
                # To say so once more would add nothing.
                return receive
            if able is None and not self.is_before(before, receive):
                able = receive
        if able is not None:
            self.put_before(able, before)
        return able


class ChainOrder(SendOrder):
    """A `SendOrder` for ranks that send only to their neighbours in a chain.

    Every influence on a rank then comes through one of its two neighbours. So each place needs only the last
    places of both neighbours that come before it.
    """

    def __init__(self, ranks: int) -> None:
        self.last: list[tuple[list[int], list[int]]] = [([], []) for _ in range(ranks)]
        """Numbers of the last places of the ranks before and after, for each rank and each of its places."""

    def append_messages(self, senders: Ints, receivers: Ints) -> tuple[list[Place], list[Place]]:
        """Append messages that follow nothing else (`SendOrder.append_messages`)."""
        rank = np.stack([senders, receivers], axis=1).ravel()
        by_rank = rank.argsort(kind="stable")
        number = np.empty_like(rank)
        starts = np.searchsorted(rank[by_rank], np.arange(len(self.last) + 1))
        for own in map(slice, starts[:-1], starts[1:]):
            number[by_rank[own]] = np.arange(own.stop - own.start)
        # Of receives alone: the rank of their send, and its number.
        source, last = np.full_like(rank, -1), np.full_like(rank, -1)
        source[1::2], last[1::2] = senders, number[::2]
        for each, own in enumerate(map(slice, starts[:-1], starts[1:])):
            before, after = (
                np.maximum.accumulate(np.where(source[by_rank[own]] == other, last[by_rank[own]], -1))
                for other in (each - 1, each + 1)
            )
            self.last[each] = before.tolist(), after.tolist()
        places = list(zip(rank.tolist(), number.tolist(), strict=True))
        return places[::2], places[1::2]

    def append(self, rank: int, follows: Place | None = None) -> Place:
        """Append a send (`SendOrder.append`)."""
        before, after = self.last[rank]
        place = rank, len(before)
        before.append(before[-1] if before else -1)
        after.append(after[-1] if after else -1)
        if follows is not None:
            self.put_before(follows, place)
        return place

    def is_before(self, earlier: Place, later: Place) -> bool:
        """Return whether a rank's send comes before a neighbour's send (`SendOrder.is_before`)."""
        (one, index), (rank, number) = earlier, later
        return self.last[rank][one > rank][number] >= index

    def put_before(self, earlier: Place, later: Place) -> None:
        """Put a rank's send before a neighbour's send (`SendOrder.put_before`)."""
        (one, index), (rank, number) = earlier, later
        known = self.last[rank][one > rank]
        while number < len(known) and known[number] < index:
            known[number] = index
            number += 1
