"""Pins and degrees in words, and which pins go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.inputs.choice import Choice
from planner.inputs.pins import Pins, WherePossible

TOGETHER = (("recompute", "recompute_modules", "recompute_method", "recompute_num_layers"),)
"""Pins of which one alone says something else than beside the others, or nothing legal."""


def word(value: object) -> str:
    """A value of a degree, as flags and pins take it."""
    if isinstance(value, WherePossible):
        return f"{word(value.value)} where possible"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def spelled(name: str, value: object) -> str:
    """A pin: `tensor_parallel=2..8`, `offload_optimizer=false`, `tensor_parallel not 1`."""
    joint = " " if isinstance(value, Choice) and value.wanted is None else "="
    return f"{name}{joint}{word(value)}"


def pins_in_words(pins: Mapping[str, object]) -> str:
    """All of `pins`, in order."""
    return " ".join(spelled(name, value) for name, value in pins.items())


def groups(pins: Pins) -> list[Pins]:
    """The pins, those that go together in one group, in the order of the first of each."""
    found: dict[tuple[str, ...], Pins] = {}
    for name, value in pins.items():
        group = next((names for names in TOGETHER if name in names), (name,))
        found.setdefault(group, {})[name] = value
    return list(found.values())


def less_one(pins: Pins) -> Iterator[tuple[str, Pins]]:
    """What is left without each group of pins that go together, and what was left out, in words."""
    for group in groups(pins):
        others = {name: value for name, value in pins.items() if name not in group}
        yield f"without the pin{'s' * (len(group) > 1)} {pins_in_words(group)}", others
