"""Layers of which a split backward computes several again at once (`recomputation._run_units`).

Backward for gradients of inputs, and later that for gradients of weights, send the first layer's input
through all of them. Tapes of one layer that is computed again say what it does for either; here what it
computes again is all of its forward, and its input is the result of the layer before it, there only as long
as it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import lru_cache
from typing import NamedTuple

from costmodels.tapes.tape import (
    AGAIN,
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

MARKS = (Mark(FORGETS), Mark(AGAIN))
"""Behind what is computed again for gradients of weights."""


class UnalignedError(ValueError):
    """What a layer computes again in backward is not its forward pass without recomputation."""


MOST_BEFORE = 1
"""Tensors that gradients of weights begin with before anything is computed again: PyTorch before 2.13 adds
gradients of outputs up."""


class Parts(NamedTuple):
    """Gradients of weights of a layer that is computed again."""

    before: tuple[Event, ...]
    again: tuple[Event, ...]
    """What is computed again."""
    mark: Mark
    """Behind it."""
    after: tuple[Event, ...]
    first: int
    """Which allocation for gradients of inputs is the first of what these compute again."""


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
    parts = _parts(split.weights, split.inputs)
    passes = [_moved(events, offset) for events in split[:-1]]
    # A first operation may come before backward asks for what is computed again.
    places = [place for place, event in enumerate(passes[0]) if isinstance(event, Allocation)]
    start, end = places[parts.first], places[parts.first + len(_made(parts.again)) - 1] + 1
    names = _aligned(passes[0][start:end], plain.forward)
    inputs, first, weights, forgotten, rest = (
        _without_ends(tuple(_renamed(event, names) for event in events), ended)
        for events in ((*passes[0][:start], *passes[0][end:]), *passes[1:])
    )

    def with_forward(events: tuple[Event, ...]) -> tuple[Event, ...]:
        before, again, mark, after, _ = _parts(events, split.inputs)
        spare = 1 + max(*_made(events), *_made(inputs), offset)
        names = {one: spare + place for place, one in enumerate(made)}
        names |= {own: storage for storage, own in _aligned(again, plain.forward).items()}
        gone = {names[storage] for storage in ended}
        # The result is the next layer's.
        own = [e for e in plain.forward if isinstance(e, Mark) or e.storage not in (INPUT, OUTPUT)]
        computed = tuple(_renamed(event, names) for event in own)
        # What gradients of inputs have left of theirs without use ends once all layers are there again.
        own_again = {*_made(again)}
        unused = [e for e in again if isinstance(e, Release) and e.storage not in own_again]
        return *_in_order(before, computed, mark, is_first), *unused, *_without_ends(after, gone)

    given = split.input_gradient
    if given is not None and given > OUTPUT_GRADIENT:
        given += offset
    found = SplitBackward(inputs, with_forward(first), with_forward(weights), forgotten, rest, given)
    tape = plain._replace(split=found)
    return tape if is_first else _with_brief_input(tape)


@lru_cache(maxsize=256)
def with_brief_input(tape: Tape) -> Tape:
    """The tape of a layer after the first of them: its input ends with its backward, and comes again.

    Raises:
        UnalignedError: what is computed again is not found in its backward.
    """
    split = tape.split
    assert split is not None

    def ordered(events: tuple[Event, ...]) -> tuple[Event, ...]:
        before, again, mark, after, _ = _parts(events, split.inputs)
        return *_in_order(before, again, mark, is_first=False), *after

    found = split._replace(first_weights=ordered(split.first_weights), weights=ordered(split.weights))
    return _with_brief_input(tape._replace(split=found))


def _with_brief_input(tape: Tape) -> Tape:
    split = tape.split
    assert split is not None
    (size,) = (e.size for e in tape.forward if isinstance(e, Allocation) and e.storage == OUTPUT)
    passes = (tape.forward, split.inputs, split.first_weights, split.weights)
    number = 1 + max(storage for events in passes for storage in _made(events))

    def with_input(events: tuple[Event, ...]) -> tuple[Event, ...]:
        place = next(n for n, event in enumerate(events) if event in MARKS)
        again = {*_made(events[:place])}
        # Norms are computed from it.
        reads = (
            n for n, e in enumerate(events) if n > place and isinstance(e, Release) and e.storage in again
        )
        read = next(reads, place)
        return (
            Allocation(number, size, "activations"),
            *events[: read + 1],
            Release(number),
            *events[read + 1 :],
        )

    found = split._replace(
        inputs=(*split.inputs, Release(INPUT)),
        first_weights=with_input(split.first_weights),
        weights=with_input(split.weights),
        rest=tuple(event for event in split.rest if event != Release(INPUT)),
    )
    return tape._replace(split=found)


def _in_order(
    before: tuple[Event, ...], again: tuple[Event, ...], mark: Mark, is_first: bool
) -> tuple[Event, ...]:
    """What is computed again and the mark behind it: that of all layers, once the first one's gradients of
    weights have begun."""
    return (*before, *again, mark) if is_first else (*again, mark, *before)


def _parts(weights: tuple[Event, ...], inputs: tuple[Event, ...]) -> Parts:
    """The parts of gradients of weights, of which those of inputs compute something again too.

    Raises:
        UnalignedError: they compute other things, or in another order.
    """
    mark = next((event for event in weights if event in MARKS), None)
    if not isinstance(mark, Mark):
        raise UnalignedError("nothing tells what is computed again")
    place = weights.index(mark)
    own = [(n, event.size) for n, event in enumerate(weights[:place]) if isinstance(event, Allocation)]
    every = [event.size for event in inputs if isinstance(event, Allocation)]
    for before in range(MOST_BEFORE + 1):
        sizes = [size for _, size in own[before:]]
        first = next((n for n in range(len(every)) if every[n : n + len(sizes)] == sizes), -1)
        if sizes and first >= 0:
            start = own[before][0]
            return Parts(weights[:start], weights[start:place], mark, weights[place + 1 :], first)
    raise UnalignedError("another order of what is computed again")


def _aligned(again: tuple[Event, ...], forward: tuple[Event, ...]) -> dict[int, int]:
    """The storages of forward that those are which are computed again: in the same order, but for what
    forward counts, as loads of experts, which must not count twice.

    Raises:
        UnalignedError: one is not found.
    """
    found, left = dict[int, int](), iter([event for event in forward if isinstance(event, Allocation)])
    for event in again:
        if isinstance(event, Allocation):
            own = next((one for one in left if one.size == event.size), None)
            if own is None:
                raise UnalignedError("what is computed again is not a part of forward")
            found[event.storage] = own.storage
    return found


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
