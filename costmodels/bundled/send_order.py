"""Which sends and receives of a pipeline's ranks come before which, and which send a rank awaits first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from costmodels.table import Ints

Place = tuple[int, int]
"""A rank, and the number of one of its sends and receives."""


class SendOrder:
    """What comes before what, kept for each send and receive as a vector clock.

    A send or receive comes after those before it on its rank, and after what it is said to follow. Its clock
    has the last one of every rank that comes before it, or is it (F. Mattern, "Virtual Time and Global States
    of Distributed Systems", 1989, section 5).
    """

    def __init__(self, ranks: int) -> None:
        self.clocks: list[list[Ints]] = [[] for _ in range(ranks)]
        # What follows a place besides the next one of its rank.
        self.after: dict[Place, list[Place]] = {}

    def append(self, rank: int, follows: Iterable[Place] = ()) -> Place:
        """The next send or receive of a rank; what it follows on other ranks has a place already."""
        own = self.clocks[rank]
        place = rank, len(own)
        clock = own[-1].copy() if own else np.full(len(self.clocks), -1)
        for earlier in follows:
            np.maximum(clock, self.clocks[earlier[0]][earlier[1]], out=clock)
            self.after.setdefault(earlier, []).append(place)
        clock[rank] = place[1]
        own.append(clock)
        return place

    def is_before(self, earlier: Place, later: Place) -> bool:
        """Whether one comes before the other, or is it."""
        return bool(self.clocks[later[0]][later[1]][earlier[0]] >= earlier[1])

    def put_before(self, earlier: Place, later: Place) -> None:
        """Let one follow another from now on; it must not come before it."""
        self.after.setdefault(earlier, []).append(later)
        todo = [(earlier, later)]
        while todo:
            (one, index), (rank, number) = todo.pop()
            known = self.clocks[rank][number]
            if rank != one and known[one] >= index:
                continue
            clock = np.maximum(known, self.clocks[one][index])
            if (clock > known).any():
                self.clocks[rank][number] = clock
                todo += [((rank, number), reached) for reached in self.after.get((rank, number), ())]
                if number + 1 < len(self.clocks[rank]):
                    todo.append(((rank, number), (rank, number + 1)))

    def first_done(self, receives: Iterable[Place], before: Place) -> Place | None:
        """Of the receives of sends that are under way, the one whose send a rank awaits `before` its next
        send: the first that comes before that anyway, else the first that can; none where none can.

        As `_add_wait_send_budget` in `torch.distributed.pipelining.schedules`. The send follows it from now
        on.
        """
        able = None
        for receive in receives:
            if self.is_before(receive, before):
                able = receive
                break
            if able is None and not self.is_before(before, receive):
                able = receive
        if able is not None:
            self.put_before(able, before)
        return able
