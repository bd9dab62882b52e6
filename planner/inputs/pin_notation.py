"""Pins and degrees in words, and which pins go together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from planner.inputs.choice import Choice
from planner.inputs.pins import Pins, WherePossible, full_name

TOGETHER = (("recompute", "recompute_modules", "recompute_method", "recompute_num_layers"),)
"""Pins of which one alone says something else than beside the others, or nothing legal."""


def value_text(value: object) -> str:
    """A value of a degree, as flags and pins take it."""
    if isinstance(value, WherePossible):
        return f"{value_text(value.value)} where possible"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def pin_text(name: str, value: object) -> str:
    """A pin: `tensor_parallel=2..8`, `offload_optimizer=false`, `tensor_parallel not 1`."""
    joint = " " if isinstance(value, Choice) and value.wanted is None else "="
    return f"{name}{joint}{value_text(value)}"


def pins_text(pins: Mapping[str, object]) -> str:
    """All of `pins`, in order."""
    return " ".join(pin_text(name, value) for name, value in pins.items())


def pin_groups(pins: Pins) -> list[Pins]:
    """The pins, those that go together in one group, in the order of the first of each."""
    found: dict[tuple[str, ...], Pins] = {}
    for name, value in pins.items():
        group = next((names for names in TOGETHER if name in names), (name,))
        found.setdefault(group, {})[name] = value
    return list(found.values())


def without_pins(pins: Pins, names: Iterable[str]) -> Pins:
    """The pins but for those of degrees `names`, and what goes together with them.

    Raises `InputError` for what is no degree.
    """
    left_out = {full_name(name, "unpin") for name in names}
    for group in pin_groups(pins):
        if left_out & group.keys():
            left_out |= group.keys()
    return {name: value for name, value in pins.items() if name not in left_out}


def pins_without_one(pins: Pins) -> Iterator[tuple[str, Pins]]:
    """The pins without each group of those that go together, and what was left out, in words."""
    for group in pin_groups(pins):
        others = {name: value for name, value in pins.items() if name not in group}
        yield f"without the pin{'s' * (len(group) > 1)} {pins_text(group)}", others
