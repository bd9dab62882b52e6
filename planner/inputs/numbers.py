"""Checks of callers' numbers against their limits."""

from __future__ import annotations

import operator
import reprlib
from numbers import Real
from typing import SupportsIndex

from costmodels.errors import InputError


def whole_number(name: str, value: SupportsIndex, most: int) -> int:
    """`value`, which may be of another library, as an int from 1 to `most`; raises `InputError`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise InputError(
            f"{name} {reprlib.repr(value)}: expected a whole number of at least 1 and at most {most}"
        )
    return number


def real_number(name: str, value: float, least: float, most: float, expected: str) -> float:
    """`value` as a float from `least` to `most`; raises `InputError`, with the `expected` values."""
    if not isinstance(value, Real) or not least <= value <= most:
        shown = f"{value:g}" if isinstance(value, float) else reprlib.repr(value)
        raise InputError(f"{name} {shown}: expected {expected}, from {least:g} to {most:g}")
    return float(value)
