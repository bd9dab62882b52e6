"""Cells of a row of measurements as numbers and switches."""

from __future__ import annotations

import re
from collections.abc import Mapping


class Unusable(Exception):
    """Raised with the reason why a row cannot be priced and is skipped."""


LARGEST = 1e12
"""Largest valid value of seconds, tokens a second and GiB; the smallest one is its reciprocal."""

MOST, MOST_LAYERS = 10**7, 10**4
"""Upper bounds of counts and of layers, which no real model or job reaches; larger values could not be
priced."""


def number(row: Mapping[str, str], name: str) -> float | None:
    """The value of a cell; None where it is blank."""
    text = row.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unusable(f"{name} is no number") from None
    if value != value:
        return None  # Other programs write a blank so.
    if value and not 1 / LARGEST < abs(value) < LARGEST:
        raise Unusable(f"{name} is out of range")
    return value


def count(row: Mapping[str, str], name: str, otherwise: int | None = None, most: int = MOST) -> int:
    """The integer in a cell; `otherwise` if the cell is blank."""
    value = number(row, name)
    if value is None:
        if otherwise is None:
            raise Unusable(f"{name} not published")
        return otherwise
    if not 1 <= value <= most or value != int(value):
        raise Unusable(f"{name} is no whole number of 1 to {most}")
    return int(value)


def switch(row: Mapping[str, str], name: str) -> bool:
    """The boolean in a cell."""
    text = row.get(name, "").lower()
    if text in ("1", "1.0", "true", "yes"):
        return True
    if text in ("0", "0.0", "false", "no"):
        return False
    raise Unusable(f"{name} not published" if not text else f"{name} is neither 0 nor 1")


def note_value(row: Mapping[str, str], name: str) -> str | None:
    """The value that the notes give as `name=value`."""
    found = re.search(rf"\b{name}=([^;,]*)", row.get("notes", ""))
    return None if found is None else found[1].strip()
