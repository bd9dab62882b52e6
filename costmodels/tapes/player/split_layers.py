"""Layers of which a split backward computes several again at once (`recomputation._run_units`).

Backward for gradients of inputs, and later that for gradients of weights, send the first layer's input
through all of them. Tapes of one layer that is computed again say what it does for either; here what it
computes again is all of its forward, and its input is the result of the layer before it, there only as long
as it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import lru_cache

from costmodels.tapes.tape import (
    FORGETS,
    INPUT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Allocation,
    Event,
    Mark,
    Release,
    SplitBackward,
    Tape,
)


class UnalignedError(ValueError):
    """What a layer computes again in backward is not its forward pass without recomputation."""


@lru_cache(maxsize=256)
def split_together(full: Tape, plain: Tape, is_first: bool) -> Tape:
    """The tape of a layer before the last of them, as it is when it is there again.

    Args:
        full: of the layer where it alone is computed again.
        plain: without recomputation.
        is_first: of these layers, so that its input stays.

    Raises:
        UnalignedError: what is computed again is not found in its backward.
    """
    split = full.split
    assert split is not None
    made = _made(plain.forward)
    ended = {event.storage for event in plain.forward if isinstance(event, Release)} & {*made} - {OUTPUT}
    offset = 1 + max(*made, OUTPUT_GRADIENT)
    passes = [_moved(events, offset) for events in split[:-1]]
    sizes = [event.size for event in _parts(split.weights)[0] if isinstance(event, Allocation)]
    # A first operation may come before backward asks for what is computed again.
    places = [place for place, event in enumerate(passes[0]) if isinstance(event, Allocation)]
    every = [event.size for event in passes[0] if isinstance(event, Allocation)]
    first_again = next((n for n in range(len(every)) if every[n : n + len(sizes)] == sizes), -1)
    if first_again < 0:
        raise UnalignedError("another order of what is computed again")
    start, end = places[first_again], places[first_again + len(sizes) - 1] + 1
    names = dict(zip(_made(passes[0][start:end]), made, strict=False))
    inputs, first, weights, forgotten, rest = (
        _without_ends(tuple(_renamed(event, names) for event in events), ended)
        for events in ((*passes[0][:start], *passes[0][end:]), *passes[1:])
    )

    def with_forward(events: tuple[Event, ...]) -> tuple[Event, ...]:
        head, tail = _parts(events)
        spare = 1 + max(*_made(events), *_made(inputs), offset)
        names = {one: spare + place for place, one in enumerate(made)}
        names |= dict(zip(made, _made(head), strict=False))
        gone = {names[storage] for storage in ended}
        # The result is the next layer's.
        own = [e for e in plain.forward if isinstance(e, Mark) or e.storage not in (INPUT, OUTPUT)]
        return (*(_renamed(event, names) for event in own), Mark(FORGETS), *_without_ends(tail, gone))

    given = split.input_gradient
    if given is not None and given > OUTPUT_GRADIENT:
        given += offset
    found = SplitBackward(inputs, with_forward(first), with_forward(weights), forgotten, rest, given)
    tape = plain._replace(split=found)
    return tape if is_first else with_brief_input(tape)


@lru_cache(maxsize=256)
def with_brief_input(tape: Tape) -> Tape:
    """The tape of a layer after the first of them: its input ends with its backward, and comes again."""
    split = tape.split
    assert split is not None
    (size,) = (e.size for e in tape.forward if isinstance(e, Allocation) and e.storage == OUTPUT)
    passes = (tape.forward, split.inputs, split.first_weights, split.weights)
    number = 1 + max(storage for events in passes for storage in _made(events))

    def with_input(events: tuple[Event, ...]) -> tuple[Event, ...]:
        head, tail = _parts(events)
        again = {*_made(head)}
        # Norms are computed from it.
        read = next((n for n, e in enumerate(tail) if isinstance(e, Release) and e.storage in again), -1)
        kept = (*tail[: read + 1], Release(number), *tail[read + 1 :])
        return (Allocation(number, size, "activations"), *head, Mark(FORGETS), *kept)

    found = split._replace(
        inputs=(*split.inputs, Release(INPUT)),
        first_weights=with_input(split.first_weights),
        weights=with_input(split.weights),
        rest=tuple(event for event in split.rest if event != Release(INPUT)),
    )
    return tape._replace(split=found)


def _parts(events: tuple[Event, ...]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """What is computed again, and the gradients of weights."""
    place = events.index(Mark(FORGETS))
    return events[:place], events[place + 1 :]


def _made(events: Iterable[Event]) -> list[int]:
    return [event.storage for event in events if isinstance(event, Allocation)]


def _without_ends(events: tuple[Event, ...], storages: Set[int]) -> tuple[Event, ...]:
    return tuple(event for event in events if not (isinstance(event, Release) and event.storage in storages))


def _moved(events: tuple[Event, ...], offset: int) -> tuple[Event, ...]:
    """Events whose storages have larger numbers, but for borders."""
    return tuple(
        event
        if isinstance(event, Mark) or event.storage <= OUTPUT_GRADIENT
        else event._replace(storage=event.storage + offset)
        for event in events
    )


def _renamed(event: Event, names: dict[int, int]) -> Event:
    if isinstance(event, Mark) or event.storage not in names:
        return event
    return event._replace(storage=names[event.storage])
