"""Gradients of weights that PyTorch's stages hold while they make the next ones.

`stage_backward_weight` of `torch.distributed.pipelining._backward` makes them operation by operation, adds
them to those that are there, and names what it has added until the next operation is over: across layers,
and while these are computed again.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence, Set
from itertools import pairwise, takewhile
from typing import NamedTuple

from costmodels.tapes.player.casts import Steps
from costmodels.tapes.tape import Allocation, Event, Mark, Release

HOLDS = "holds"
"""Mark before the end of what the last operation of a unit has made, which stays a while."""

TAKEN = "taken"
"""Mark behind the first operation of a unit, where what one before it has made ends."""


class Operations(NamedTuple):
    """Which gradients of weights come together, by their storages."""

    first: frozenset[int]
    """Those of the first operation of a unit."""
    last: frozenset[int]
    together: frozenset[int]
    """Those that follow another one of the same operation, with nothing made between."""


def operations_of(weights: Sequence[Event], gradients: Set[int]) -> Operations:
    """What the releases in a pass tell that adds new gradients to others: those of an operation end when the
    next one is over, all at once.

    Args:
        gradients: their storages.
    """
    made = [(n, one.storage) for n, one in enumerate(weights) if isinstance(one, Allocation)]
    places = {storage: n for n, storage in made if storage in gradients}
    if not places:
        return Operations(frozenset(), frozenset(), frozenset())
    ended = {one.storage: n for n, one in enumerate(weights) if isinstance(one, Release)}
    ends = {storage: ended.get(storage, len(weights)) for storage in places}
    # By the number of allocations before.
    starts = [place for place, _ in made]
    clusters = {storage: bisect(starts, end) for storage, end in ends.items()}
    together = frozenset(
        storage
        for (start, before), (end, storage) in pairwise(made)
        if {before, storage} <= places.keys()
        and clusters[before] == clusters[storage]
        and not any(start < place < end for place in ends.values())
    )
    order = [storage for _, storage in made if storage in gradients]
    first = [storage for storage in order if clusters[storage] == clusters[order[0]]]
    if clusters[order[0]] == len(made):
        # All end with the unit.
        first = [order[0], *takewhile(together.__contains__, order[1:])]
    # What comes before the last operation has ended what is before that.
    earlier = max((end for end in ends.values() if end < places[order[-1]]), default=-1)
    last = [storage for storage in order if places[storage] > earlier]
    if earlier < 0:
        start = next(n for n in reversed(range(len(order))) if order[n] not in together)
        last = order[start:]
    return Operations(frozenset(first), frozenset(last), together)


def with_held(events: Steps, operations: Operations) -> Steps:
    """Gradients of weights of a unit with these marks."""
    places = [
        n for n, one in enumerate(events) if isinstance(one, Allocation) and one.storage in operations.first
    ]
    if not places:
        return events
    others = (n for n, one in enumerate(events) if n > places[-1] and isinstance(one, Allocation))
    end = next(others, len(events))
    every = (*events[:end], Mark(TAKEN), *events[end:])
    ends = tuple(one for one in events if isinstance(one, Release) and one.storage in operations.last)
    return (*(one for one in every if one not in ends), Mark(HOLDS), *ends) if ends else every
