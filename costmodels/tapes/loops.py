"""Tapes of units that take more steps for longer sequences, as one length of sequence has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from costmodels.tapes.tape import Event, Loop, Mark, Tape, passes_of, with_passes


def unrolled(tape: Tape, steps: int) -> Tape:
    """The tape of so many steps, each of whose events is there.

    Raises:
        ValueError: there are too few steps for its loops.
    """
    repeats = tape.repeats
    if repeats is None:
        return tape
    passes = [
        tuple(_events(events, loops, shifts, steps))
        for events, loops, shifts in zip(passes_of(tape), repeats.loops, repeats.shifts, strict=True)
    ]
    given = [tape.input_gradient, None if tape.split is None else tape.split.input_gradient]
    moved = [
        None if one is None else one + by_step * steps
        for one, by_step in zip(given, repeats.input_gradients, strict=True)
    ]
    return with_passes(tape, passes, moved)._replace(repeats=None)


def _events(
    events: Sequence[Event], loops: Sequence[Loop], shifts: Sequence[tuple[int, int]], steps: int
) -> Iterator[Event]:
    place = 0
    for first, length, less in (*loops, Loop(len(events), 0, steps)):
        if steps < less:
            raise ValueError(f"a tape of at least {less} steps is not that of {steps}")
        for at in range(place, first):
            yield _moved(events[at], shifts[at], steps, 0)
        for turn in range(steps - less):
            for at in range(first, first + length):
                yield _moved(events[at], shifts[at], steps, turn)
        place = first + length


def _moved(event: Event, shift: tuple[int, int], steps: int, turn: int) -> Event:
    if isinstance(event, Mark) or shift == (0, 0):
        return event
    return event._replace(storage=event.storage + shift[0] * steps + shift[1] * turn)
