"""Where autograd casts gradients to the number format in which they are reduced: as soon as their operation
is over (`validate_outputs` of PyTorch's engine), before the next one and before anybody takes them."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import Literal, NamedTuple

from costmodels.tapes.tape import (
    EXPERTS,
    FURTHER,
    OUTPUT_GRADIENT,
    Addend,
    Allocation,
    Event,
    Gradient,
    Parameter,
    Release,
    Tape,
    shared_parameter,
)

Manner = Literal["makes", "casts", "adds"]
"""How autograd gives gradients: as it makes them, in the number format in which they are reduced, or by
adding to those that are there."""


class Cast(NamedTuple):
    """A gradient that autograd casts."""

    size: int
    """Bytes afterwards."""
    always: bool
    """Also where it is added to another one, or reduced at once."""


Casts = Mapping[int, Cast]
"""By the number of the parameter."""


class Casting(NamedTuple):
    """A storage makes place for one of `size` bytes, which has its number from here on."""

    storage: int
    size: int


class Sum(NamedTuple):
    """A storage of `size` bytes begins: the sum of gradients that were cast."""

    storage: int
    size: int


Steps = tuple[Event | Casting | Sum, ...]


def always_cast(casts: Casts) -> Casts:
    """Those of gradients that are cast wherever they go."""
    return {number: cast for number, cast in casts.items() if cast.always}


def cast_backward(tape: Tape, casts: Casts) -> Steps:
    """Backward of a unit with its casts: those of one operation in the order of parameters."""
    found: list[Event | Casting | Sum] = []
    embedded = _of_embedding(tape)
    added, backward = _with_addends(tape.backward, casts, embedded)
    for are_gradients, some in groupby(backward, lambda event: isinstance(event, Gradient)):
        events = tuple(some)
        if are_gradients:
            made = {one.storage: one.parameter for one in events if isinstance(one, Gradient)}
            made = {storage: number for storage, number in made.items() if number not in added}
            place = len(found)
            # The embedding's operation itself makes the gradient, and keeps what it was given until it ends;
            # those of experts that compute one by one do too. What others make, an operation without memory
            # of its own hands on.
            if tape.input_gradient is None and place and found[place - 1] == Release(OUTPUT_GRADIENT):
                place -= 1
            if embedded & made.keys() or any(_is_stacked(tape, number) for number in made.values()):
                place = _before_ends(found)
            found[place:place] = _castings(made, casts)
        found += events
    return tuple(found)


def _of_embedding(tape: Tape) -> set[int]:
    """The storages of gradients of the embedding of modules that predict further tokens, as its operations
    make them: forward makes those of the head's matrix, which it may be."""
    if not any(one.group.startswith(FURTHER) for one in tape.parameters):
        return set()
    shared = shared_parameter(tape)
    given = {
        one.storage for one in tape.backward if isinstance(one, Gradient | Addend) and one.parameter == shared
    }
    return given & _allocated(tape.backward)


def _before_ends(events: Sequence[Event | Casting | Sum]) -> int:
    """The place before the storages that end last, which an operation holds until it is over."""
    place = len(events)
    while place and isinstance(events[place - 1], Release):
        place -= 1
    return place


def _is_stacked(tape: Tape, number: int) -> bool:
    """Whether what makes the gradient of a parameter puts it together of those of experts that compute one by
    one: a rank's part of all experts is handed on once more."""
    parameter = tape.parameters[number]
    return computes_one_by_one(parameter) and not parameter.distributed


def computes_one_by_one(parameter: Parameter) -> bool:
    """Whether it is of routed experts that are a loop: their number is known then, as there are so many
    products."""
    return parameter.group.endswith(EXPERTS) and not any(term.powers for term in parameter.shape[0])


def _with_addends(events: tuple[Event, ...], casts: Casts, embedded: Set[int]) -> tuple[set[int], Steps]:
    """Events with the casts of gradients that are added up, and the parameters whose they are."""
    found: list[Event | Casting | Sum] = []
    added: set[int] = set()
    summed: int | None = None
    for event in events:
        if isinstance(event, Addend):
            cast = casts.get(event.parameter)
            if cast is not None:
                place = _before_ends(found) if event.storage in embedded else len(found)
                found.insert(place, Casting(event.storage, cast.size))
                summed = cast.size if event.parameter in added else None
                added.add(event.parameter)
        elif isinstance(event, Allocation) and summed is not None:
            found.append(Sum(event.storage, summed))
            summed = None
        else:
            found.append(event)
    return added, tuple(found)


def cast_weights(tape: Tape, events: tuple[Event, ...], casts: Casts, together: Set[int]) -> Steps:
    """Gradients of weights apart, with their casts.

    Args:
        tape: whose backward is split.
        together: gradients that one operation makes with the one before.
    """
    split = tape.split
    assert split is not None
    gradients = {one.storage: one.parameter for one in split.first_weights if isinstance(one, Gradient)}
    own, given = (_allocated(each) for each in (events, split.inputs))
    # What an operation has saved ends before it is over; these the stage holds.
    held = given | gradients.keys() | {OUTPUT_GRADIENT}
    # Of a head, forward has made the gradient of its matrix.
    early = {storage: number for storage, number in gradients.items() if storage not in own}
    found: list[Event | Casting] = []
    made: dict[int, int] = {}
    there: dict[int, int] = {}
    later: list[Release] = []

    def at_their_ends() -> Iterator[Event | Casting]:
        # What was there comes last, by itself, as its matrix is the last parameter.
        given_last = {OUTPUT_GRADIENT, *gradients} if there else set[int]()
        yield from _castings(made, casts)
        yield from (event for event in later if event.storage not in given_last)
        yield from _castings(there, casts)
        yield from (event for event in later if event.storage in given_last)

    for event in events:
        if isinstance(event, Release | Gradient) and event.storage in early:
            there[event.storage] = early.pop(event.storage)
        if (made or there) and isinstance(event, Release):
            (later if event.storage in held else found).append(event)
            continue
        if (made or there) and not (isinstance(event, Allocation) and event.storage in together):
            found += at_their_ends()
            made, there, later = {}, {}, []
        found.append(event)
        if isinstance(event, Allocation) and event.storage in gradients:
            number = gradients[event.storage]
            if _is_stacked(tape, number):
                # What it is put together of is there until then.
                found += _castings({event.storage: number}, casts)
            else:
                made[event.storage] = number
    return (*found, *at_their_ends())


def _allocated(events: tuple[Event, ...]) -> set[int]:
    return {one.storage for one in events if isinstance(one, Allocation)}


def _castings(gradients: Mapping[int, int], casts: Casts) -> list[Casting]:
    """Casts of storages that are gradients of parameters."""
    ordered = sorted(gradients.items(), key=lambda item: item[1])
    return [Casting(storage, casts[number].size) for storage, number in ordered if number in casts]
