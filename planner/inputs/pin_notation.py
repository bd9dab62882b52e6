"""Pins and degrees in words, and groups of pins that depend on each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from planner.inputs.choice import Choice
from planner.inputs.pins import Pins, WherePossible, full_name

TOGETHER = (("recompute", "recompute_modules", "recompute_method", "recompute_num_layers"),)
"""Groups of pins that must be removed together, as one alone has another meaning or is illegal."""


def value_text(value: object) -> str:
    """A value of a degree, in the form of flags and pins."""
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
    """The text of all `pins`, in order."""
    return " ".join(pin_text(name, value) for name, value in pins.items())


def pin_groups(pins: Pins) -> list[Pins]:
    """The pins in groups that belong together, in the order of the first pin of each group."""
    found: dict[tuple[str, ...], Pins] = {}
    for name, value in pins.items():
        group = next((names for names in TOGETHER if name in names), (name,))
        found.setdefault(group, {})[name] = value
    return list(found.values())


def without_pins(pins: Pins, names: Iterable[str]) -> Pins:
    """The pins without those of degrees `names`, and without pins that belong together with them.

    Raises `InputError` for unknown degrees.
    """
    left_out = {full_name(name, "unpin") for name in names}
    for group in pin_groups(pins):
        if left_out & group.keys():
            left_out |= group.keys()
    return {name: value for name, value in pins.items() if name not in left_out}


def pins_without_one(pins: Pins) -> Iterator[tuple[str, Pins]]:
    """The pins without one group of pins that belong together, and that group in words; one result for each
    group."""
    for group in pin_groups(pins):
        others = {name: value for name, value in pins.items() if name not in group}
        yield f"without the pin{'s' * (len(group) > 1)} {pins_text(group)}", others
