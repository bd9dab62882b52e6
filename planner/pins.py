"""Pins: degrees of freedom that the user fixes, such as `tensor_parallel=8` or `tp=8`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from costmodels.errors import InputError
from costmodels.hardware import Precision
from costmodels.layout import SHORT_NAMES, Layout, Recompute, Schedule


@dataclass(frozen=True)
class WherePossible:
    """A value that holds wherever the group it needs has two ranks at least; elsewhere zero or false."""

    value: int | bool

    def __str__(self) -> str:
        return f"{self.value} where possible"


PinValue = int | bool | str | tuple[int, ...] | WherePossible
Pins = dict[str, PinValue]
"""Values by the full name of a field of `Layout`, validated."""

PinInput = Mapping[str, object] | Iterable[str] | str | None
"""What callers may give: a mapping, or strings `name=value`; names full or short."""

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute),
    "schedule": get_args(Schedule),
    "precision": get_args(Precision),
}

_ALWAYS_ONE = ("context_parallel", "expert_parallel", "expert_tensor_parallel")
"""Degrees that the search does not vary."""

ZERO_STAGES = (0, 1, 2, 3)

GROUPED = ("sequence_parallel", "zero_stage")
"""Degrees that need a group of ranks: the tensor-parallel and the data-parallel one."""


@dataclass(frozen=True)
class _Item:
    name: str
    value: object

    def wrong(self, expected: str) -> InputError:
        return InputError(f"pin {self.name}={self.value}: expected {expected}")


def parse_pins(pin: PinInput) -> Pins:
    """Validated pins by full name.

    Raises `InputError` for an unknown name, a value of the wrong kind, or two values for one name.
    """
    pins: Pins = {}
    for item in _items(pin):
        value = _value(item)
        if pins.setdefault(item.name, value) != value:
            raise InputError(f"pin {item.name} is given twice: {pins[item.name]} and {value}")
    chunks = pins.get("virtual_pipeline_parallel")
    if (
        chunks is not None
        and "schedule" in pins
        and (pins["schedule"] == "interleaved") != (int(str(chunks)) > 1)
    ):
        raise InputError(
            f"pin schedule={pins['schedule']} contradicts virtual_pipeline_parallel={chunks}; "
            "interleaved needs at least 2, 1f1b exactly 1"
        )
    return pins


def where_possible(pins: Pins, name: str, value: int | bool) -> Pins:
    """`pins` and `name` (one of `GROUPED`), fixed wherever its group allows; a strict pin of `value` stays.

    Raises `InputError` when another value is pinned.
    """
    pinned = pins.get(name, WherePossible(value))
    if pinned not in (value, WherePossible(value)):
        raise InputError(f"pin {name} is given twice: {pinned} and {value}")
    return {**pins, name: pinned}


def _items(pin: PinInput) -> Iterable[_Item]:
    if pin is None:
        return
    if isinstance(pin, Mapping):
        for name, value in pin.items():
            yield _Item(_full_name(name), value)
        return
    for text in [pin] if isinstance(pin, str) else pin:
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise InputError(f"pin {text!r}: expected name=value, such as tensor_parallel=8")
        yield _Item(_full_name(name.strip()), value.strip())


def _full_name(name: str) -> str:
    full = SHORT_NAMES.get(name, name).replace("-", "_")
    known = list(Layout.model_fields)
    if full not in known:
        near = difflib.get_close_matches(full, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"pin {name}: no such field; {hint}use one of {', '.join(known)}")
    return full


def _value(item: _Item) -> PinValue:
    if isinstance(item.value, WherePossible):
        if item.name not in GROUPED:
            raise item.wrong(f"a plain value: only {' and '.join(GROUPED)} need a group")
        _value(_Item(item.name, item.value.value))
        return item.value
    text = str(item.value).strip().lower()
    if item.name == "sequence_parallel":
        if text not in _WORDS:
            raise item.wrong("true or false")
        return _WORDS[text]
    if item.name in _CHOICES:
        if text not in _CHOICES[item.name]:
            raise item.wrong(f"one of {', '.join(_CHOICES[item.name])}")
        return text
    if item.name == "layers_per_stage":
        parts = item.value if isinstance(item.value, (list, tuple)) else text.split(",")
        return tuple(_count(item, str(part), "layers of each stage such as 8,8,7,7") for part in parts)
    if item.name == "zero_stage":
        if text not in map(str, ZERO_STAGES):
            raise item.wrong(f"one of {', '.join(map(str, ZERO_STAGES))}")
        return int(text)
    value = _count(item, text, "a whole number of at least 1")
    if item.name in _ALWAYS_ONE and value != 1:
        raise item.wrong("1: the search does not vary this degree")
    return value


def _count(item: _Item, text: str, expected: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
        raise item.wrong(expected)
    return int(digits)
