"""Tapes under a layout in which FSDP2 manages no parameters (`runtime.parallel.working_copies`): they compute
as plain tensors, while tapes are recorded with those that FSDP2 gives, distributed ones. Of these, gradients
come by an operation of its own (`to_local`), before which others may."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from costmodels.tapes.player.casts import computes_one_by_one
from costmodels.tapes.tape import (
    BACKWARD_END,
    Allocation,
    Event,
    Gradient,
    Mark,
    Release,
    Size,
    Tape,
)


def with_plain_parameters(tape: Tape, has_operations: bool) -> Tape:
    """The tape of a unit whose gradients are taken as soon as they are there: those of experts that compute
    one by one before that of the rows is whole, and others before that of an input is added to another one's.

    Args:
        has_operations: gradients come from operations one by one, not from a compiled function.
    """
    loops = {one.group for one in tape.parameters if computes_one_by_one(one)}
    comes_late = has_operations and any(one.distributed for one in tape.parameters)
    return _taken_early(tape, frozenset(loops), comes_late) if loops or comes_late else tape


@lru_cache(maxsize=1024)
def _taken_early(tape: Tape, loops: frozenset[str], before_sums: bool) -> Tape:
    events = tape.backward
    for group in loops:
        events = _with_early_end(tape, events, group)
    return tape._replace(backward=_before_sums(tape, events) if before_sums else events)


def _with_early_end(tape: Tape, backward: tuple[Event, ...], group: str) -> tuple[Event, ...]:
    """The end of a group of experts when the last of their gradients has been put together."""
    ends = Mark(group + BACKWARD_END)
    if ends not in backward:
        return backward
    events = [event for event in backward if event != ends]
    experts = {number for number, one in enumerate(tape.parameters) if one.group == group}
    given = {one.storage for one in events if isinstance(one, Gradient) and one.parameter in experts}
    place = 1 + max(n for n, one in enumerate(events) if isinstance(one, Allocation) and one.storage in given)
    while isinstance(events[place], Release):
        place += 1
    events.insert(place, ends)
    return tuple(events)


def _before_sums(tape: Tape, backward: tuple[Event, ...]) -> tuple[Event, ...]:
    """Gradients of distributed parameters before a sum of those of an input of which their operation has made
    one, too."""
    made = {one.storage: (n, one.size) for n, one in enumerate(backward) if isinstance(one, Allocation)}
    found: list[Event] = []
    for event in backward:
        place = len(found)
        if isinstance(event, Gradient) and tape.parameters[event.parameter].distributed:
            while place and isinstance(found[place - 1], Gradient):
                place -= 1
            place = place - 3 if _follows(found[place - 3 : place], made, event.storage) else len(found)
        found.insert(place, event)
    return tuple(found)


def _follows(events: Sequence[Event], made: Mapping[int, tuple[int, Size]], gradient: int) -> bool:
    """Whether events are a sum of two gradients and their end, which come after what has made the last of
    them and then the `gradient` of a parameter."""
    match events:
        case [Allocation(total, size, _), Release(one), Release(other)]:
            parts = [made[storage] for storage in (one, other) if storage in made]
            alike = gradient in made and [of_part for _, of_part in parts] == [size, size]
            return alike and max(parts)[0] < made[gradient][0] < made[total][0]
    return False
