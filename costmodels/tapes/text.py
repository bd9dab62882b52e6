"""Tapes as JSON, and symbolic sizes as text: `2 batch hidden seq tp^-1 + 8`."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

from costmodels.tapes.tape import (
    Addend,
    Allocation,
    Event,
    Gradient,
    Loop,
    Mark,
    Parameter,
    Release,
    Repeats,
    Size,
    SplitBackward,
    Tape,
    Term,
)


def size_text(size: Size) -> str:
    """A symbolic size as text."""
    return " + ".join(_term_text(term) for term in size) or "0"


def _term_text(term: Term) -> str:
    powers = [name if exponent == 1 else f"{name}^{exponent}" for name, exponent in term.powers]
    return " ".join([str(Fraction(term.numerator, term.denominator)), *powers])


@lru_cache(maxsize=4096)
def parsed_size(text: str) -> Size:
    """The symbolic size of a text."""
    return () if text == "0" else tuple(_parsed_term(part) for part in text.split(" + "))


def _parsed_term(text: str) -> Term:
    coefficient, *names = text.split()
    value = Fraction(coefficient)
    pairs = (name.partition("^") for name in names)
    return Term(
        value.numerator, value.denominator, tuple((name, int(power or 1)) for name, _, power in pairs)
    )


def as_json(tape: Tape) -> dict[str, Any]:
    """A tape for a file: sizes and categories by their numbers in tables.

    An event is [storage, size, category] where a storage begins, [storage] where one ends, [storage,
    parameter] for a gradient, [storage, parameter, 0, 0] for an addend, and the name of a mark.
    """
    sizes: dict[str, int] = {}
    categories: dict[str, int] = {}

    def number(table: dict[str, int], text: str) -> int:
        return table.setdefault(text, len(table))

    def event(one: Event) -> Any:
        match one:
            case Allocation(storage, size, category):
                return [storage, number(sizes, size_text(size)), number(categories, category)]
            case Release(storage):
                return [storage]
            case Gradient(parameter, storage):
                return [storage, parameter]
            case Addend(parameter, storage):
                return [storage, parameter, 0, 0]
            case Mark(name):
                return name

    def parts(split: SplitBackward) -> list[Any]:
        return [*(list(map(event, part)) for part in split[:-1]), split.input_gradient]

    return {
        "parameters": [
            [
                one.name,
                [size_text(side) for side in one.shape],
                *one[2:5],
                *([] if one.split is None else [one.split]),
            ]
            for one in tape.parameters
        ],
        "forward": [event(one) for one in tape.forward],
        "backward": [event(one) for one in tape.backward],
        "input_gradient": tape.input_gradient,
        "input_category": tape.input_category,
        "split": tape.split and parts(tape.split),
        **({} if tape.split_end is None else {"split_end": parts(tape.split_end)}),
        **({} if tape.repeats is None else {"repeats": tape.repeats}),
        "sizes": list(sizes),
        "categories": list(categories),
    }


def parsed_tape(data: dict[str, Any]) -> Tape:
    """The tape of a file."""
    sizes = [parsed_size(text) for text in data["sizes"]]
    categories = data["categories"]

    def event(one: Any) -> Event:
        match one:
            case str():
                return Mark(one)
            case [storage]:
                return Release(storage)
            case [storage, parameter]:
                return Gradient(parameter, storage)
            case [storage, size, category]:
                return Allocation(storage, sizes[size], categories[category])
            case [storage, parameter, _, _]:
                return Addend(parameter, storage)
        raise ValueError(f"{one!r} is no event of a tape")

    def events(every: list[Any]) -> tuple[Event, ...]:
        return tuple(map(event, every))

    def parts(split: list[Any] | None) -> SplitBackward | None:
        if split is None:
            return None
        inputs, first, weights, forgotten, rest = map(events, split[:-1])
        return SplitBackward(inputs, first, weights, forgotten, rest, split[-1])

    return Tape(
        tuple(
            Parameter(name, tuple(map(parsed_size, shape)), group, partial, distributed, *map(tuple, split))
            for name, shape, group, partial, distributed, *split in data["parameters"]
        ),
        events(data["forward"]),
        events(data["backward"]),
        data["input_gradient"],
        data["input_category"],
        parts(data.get("split")),
        parts(data.get("split_end")),
        _parsed_repeats(data.get("repeats")),
    )


def _parsed_repeats(data: Any) -> Repeats | None:
    if data is None:
        return None
    dimension, loops, shifts, input_gradients = data
    return Repeats(
        dimension,
        tuple(tuple(Loop(*loop) for loop in each) for each in loops),
        tuple(tuple((by_step, by_turn) for by_step, by_turn in each) for each in shifts),
        (input_gradients[0], input_gradients[1]),
    )
