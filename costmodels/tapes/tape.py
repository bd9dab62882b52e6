"""A tape: what one unit of a model allocates and frees in forward and backward, with symbolic sizes.

A unit is an embedding, a layer, an output head or the loss. The dry run records tapes
(`runtime.dryrun.unit_recorder`); a player adds what is around units: schedule, FSDP2, messages, optimizer.
Sizes are sums of products of dimensions (`costmodels.tapes.dimensions`), so that one tape serves every model
and layout whose unit does the same operations (`costmodels.tapes.structure`).

Storages are numbers. Those at the borders of a unit have several holders, and end when the last lets go:

- `INPUT` is the `OUTPUT` of the unit before. Its `Release` says that this unit holds it no longer: at the end
  of forward, or in backward where the unit saves it.
- `OUTPUT` is allocated in forward. Its `Release` says the same of the unit that made it.
- `OUTPUT_GRADIENT` is the gradient of the output, which the unit after it has made. Its `Release` says that
  backward has used it.
- The gradient of the input is allocated in backward and goes to the unit before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

INPUT, OUTPUT, OUTPUT_GRADIENT = 0, 1, 2
"""Storages at the borders of a unit; its own ones have larger numbers."""

LAYER, EXPERTS = "layer", "experts"
"""Groups of parameters that FSDP2 wraps together: the routed experts of a layer, and all else of a unit."""

FURTHER = "further"
"""Begins the groups of modules that predict further tokens, each with the number of its depth: a module
(`further1`), its layer (`further1_layer`) and the routed experts of that (`further1_experts`)."""

FORWARD, FORWARD_END, BACKWARD, BACKWARD_END = "_forward", "_forward_end", "_backward", "_backward_end"
"""Marks, after the name of a group that is not all of a unit: where FSDP2 gathers its parameters and is done
with them."""

FETCHES, FETCHED = "fetches", "fetched"
"""Marks around the copies back of what a layer has sent to host memory; another layer may have begun them."""

FETCHES_BEFORE = "fetches_before"
"""Mark of where a layer begins the copies back of the layer before it."""

FORGETS = "forgets"
"""Mark of gradients of weights: what the unit before has computed again for them ends."""

AGAIN = "again"
"""Mark of gradients of weights, in the place of `FORGETS`: what was computed again is there, and nobody's
ends, as those of inputs have left a part of theirs."""

SEEN = "seen"
"""Mark of gradients of weights: FSDP2 comes to those that were there before it began with the experts'."""

ENDS = "ends"
"""Mark of gradients of inputs: what ends with the output of a stage, once the gradients of all its inputs are
there."""


class Term(NamedTuple):
    """A product of dimensions and of a coefficient."""

    numerator: int
    denominator: int
    powers: tuple[tuple[str, int], ...]
    """Names of dimensions and their exponents."""


Size = tuple[Term, ...]
"""A sum of terms: bytes before the allocator rounds them, or elements of one side of a parameter."""


class Allocation(NamedTuple):
    """A storage begins."""

    storage: int
    size: Size
    category: str
    """As `costmodels.memory.peak` and the dry run name the owners of bytes."""


class Release(NamedTuple):
    """A storage ends, or this unit holds it no longer."""

    storage: int


class Gradient(NamedTuple):
    """Autograd has the gradient of a parameter; whoever keeps gradients has the storage from here on."""

    parameter: int
    storage: int


class Addend(NamedTuple):
    """Autograd has one of several gradients that it adds up to that of a parameter; where it has had another
    one, the storage that begins next is their sum."""

    parameter: int
    storage: int


class Mark(NamedTuple):
    """Something happens that others may want to act on."""

    name: str


Event = Allocation | Release | Gradient | Addend | Mark


class Parameter(NamedTuple):
    """One parameter of a unit, as one rank has it before data parallelism splits it."""

    name: str
    shape: tuple[Size, ...]
    group: str
    partial: bool
    """The gradient of a rank is a part of a sum over tensor-parallel ranks, which FSDP2 makes first."""
    distributed: bool
    """It is a DTensor."""
    split: tuple[int, ...] | None = None
    """The sides along which tensor-parallel ranks have parts of it, or those of routed experts; None where a
    tape does not tell."""


class SplitBackward(NamedTuple):
    """Backward as schedules run it that compute gradients of inputs and of weights apart.

    The storages of forward are those of the tape.
    """

    inputs: tuple[Event, ...]
    """Gradients of inputs; the graph stays."""
    first_weights: tuple[Event, ...]
    """Gradients of weights that have none yet: their events come last."""
    weights: tuple[Event, ...]
    """Gradients of weights that are added to what is there: they come and go."""
    forgotten: tuple[Event, ...]
    """What was computed again and not used ends at the mark `FORGETS` of the next unit, or with `rest`."""
    rest: tuple[Event, ...]
    """What the graph still held ends when the gradients of all weights of the stage are there."""
    input_gradient: int | None


class Loop(NamedTuple):
    """Events of a pass that happen once for each step of a unit, but for some of the steps."""

    first: int
    """The place of the first of them among the events of the pass, of which it has one turn."""
    length: int
    less: int
    """Turns are so many less than steps."""


class Repeats(NamedTuple):
    """What longer sequences take more steps of."""

    dimension: str
    """The number of steps."""
    loops: tuple[tuple[Loop, ...], ...]
    """Of each pass, in the order of `passes_of`."""
    shifts: tuple[tuple[tuple[int, int], ...], ...]
    """Of each pass and event, what is added to the number of its storage with each step, and each turn."""
    input_gradients: tuple[int, int]
    """What is added with each step to the numbers of these, with whole backward passes and split ones."""


class Tape(NamedTuple):
    """What a unit does to memory."""

    parameters: tuple[Parameter, ...]
    """In the order in which the module lists them."""
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    input_gradient: int | None
    """The storage that goes to the unit before; none where there is no such unit."""
    input_category: str
    """What the input is while this unit holds it over to backward; "" where it does not."""
    split: SplitBackward | None = None
    """None where it was not recorded, as for compiled layers, whose graphs cannot be split."""
    split_end: SplitBackward | None = None
    """The same of the last unit of a stage, whose output ends before gradients of weights are made, and with
    it (`ENDS`) what these do not need; None where there is no such thing."""
    repeats: Repeats | None = None
    """None where sequences of all lengths take the same operations, or where steps are `unrolled`."""


def passes_of(tape: Tape) -> tuple[tuple[Event, ...], ...]:
    """The events of all passes of a tape."""
    splits = (split[:-1] for split in (tape.split, tape.split_end) if split is not None)
    return (tape.forward, tape.backward, *chain.from_iterable(splits))


def with_passes(tape: Tape, passes: Sequence[tuple[Event, ...]], given: Sequence[int | None]) -> Tape:
    """A tape with other passes, and other storages that go to the unit before it."""
    forward, backward, *others = passes
    splits: list[SplitBackward | None] = []
    for split in (tape.split, tape.split_end):
        if split is not None:
            inputs, first, weights, forgotten, rest, *others = others
            split = SplitBackward(inputs, first, weights, forgotten, rest, given[1])
        splits.append(split)
    return Tape(
        tape.parameters, forward, backward, given[0], tape.input_category, splits[0], splits[1], tape.repeats
    )


def shared_parameter(tape: Tape) -> int:
    """The number of the parameter of a head that may be the embedding, or its copy: the last of its own."""
    return max(number for number, one in enumerate(tape.parameters) if one.group == LAYER)


def seen_gradients(weights: Sequence[Event]) -> list[list[int]]:
    """The parameters whose gradients are there by each `SEEN` of gradients of weights, in the order in which
    they were made: what the experts' backward gives itself, it gives at its end."""
    found, begun = list[list[int]](), -1
    made = {event.storage: place for place, event in enumerate(weights) if isinstance(event, Allocation)}
    given = [event for event in weights if isinstance(event, Gradient)]
    given.sort(key=lambda one: made.get(one.storage, -1))
    for place, event in enumerate(weights):
        if event == Mark(EXPERTS + BACKWARD):
            begun = place
        elif event == Mark(SEEN):
            found.append([one.parameter for one in given if made.get(one.storage, -1) < begun])
    return found


def made_by_experts(weights: Sequence[Event]) -> set[int]:
    """The parameters whose gradients the experts' backward gives itself, amid gradients of weights."""
    made, is_begun = set[int](), False
    for event in weights:
        if isinstance(event, Mark) and event.name in (EXPERTS + BACKWARD, SEEN):
            is_begun = event.name != SEEN
        elif isinstance(event, Allocation) and is_begun:
            made.add(event.storage)
    return {one.parameter for one in weights if isinstance(one, Gradient) and one.storage in made}


def elements_of(size: Size, dimensions: Mapping[str, int]) -> int:
    """The value of a symbolic size: bytes of a storage, or elements of a side.

    Raises:
        ValueError: it is no whole number, so that the dimensions do not belong to the tape.
    """
    total = Fraction(0)
    for numerator, denominator, powers in size:
        product = Fraction(numerator, denominator)
        for name, exponent in powers:
            product *= Fraction(dimensions[name]) ** exponent
        total += product
    if total.denominator != 1:
        raise ValueError(f"a size of {total} is no whole number")
    return total.numerator
