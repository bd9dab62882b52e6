"""Sums of money as people write them: `2.5`, `$2.5`, `2.5 EUR`, `200k`."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from costmodels.errors import InputError
from planner.budget.words import scaled_number
from planner.inputs.numbers import real_number

NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d+)?\s*([kmb](?![a-z]))?", re.IGNORECASE)
"""Pattern of a number, its power of ten, and its suffix; signs and commas are not part of it."""

PER_HOUR = re.compile(r"\s*(/|per\b)\s*((gpu|device)[- ]?)?(h|hr|hour)$", re.IGNORECASE)
"""The unit of a price, as in `/h` or `per GPU-hour`."""

SCALES = {"k": 1e3, "m": 1e6, "b": 1e9}

SIGNS = 4
"""Most characters of a currency sign, such as `US$`."""


class Money(NamedTuple):
    """A sum, and the sign or the code of its currency."""

    amount: float
    currency: str = ""
    """`$`, `US$`, `EUR`; empty where none was written."""

    def __str__(self) -> str:
        return money_text(self.amount, self.currency)


def money_text(amount: float, currency: str) -> str:
    """A sum of money such as `$173,424`, `1.2M EUR`, or the number alone.

    Examples:
        >>> money_text(173424.0, "$"), money_text(1.2e6, "EUR"), money_text(2.5, "")
        ('$173,424', '1.2M EUR', '2.5')
    """
    number = scaled_number(amount)
    if not currency:
        return number
    return f"{currency}{number}" if _is_sign(currency[-1]) else f"{number} {currency}"


def parse_money(name: str, given: str | float, least: float, most: float, what: str) -> Money:
    """A sum of money from `least` to `most`: a number, or text with a currency's sign or code.

    Args:
        name: name of the argument.
        what: purpose of the sum, such as `for a device and hour`.

    Raises:
        InputError: `given` is no such sum.
    """
    expected = f"money above 0 {what}, such as 2.5, $2.5 or 2.5 EUR"
    if not isinstance(given, str):
        return Money(real_number(name, given, least, most, expected))
    found = _parsed(given)
    if found is None or not least <= found.amount <= most:
        raise InputError(f"{name} {given.strip()[:40]}: expected {expected}, from {least:g} to {most:g}")
    return found


def _parsed(text: str) -> Money | None:
    text = PER_HOUR.sub("", text.strip())
    number = NUMBER.search(text)
    if number is None:
        return None
    marks = [mark for mark in (text[: number.start()].strip(), text[number.end() :].strip()) if mark]
    if len(marks) > 1 or (marks and not _is_currency(marks[0])):
        return None
    digits, power, scale = number.groups()
    amount = float(digits + (power or "")) * SCALES.get((scale or "").lower(), 1.0)
    currency = marks[0] if marks else ""
    return Money(amount, currency.upper() if currency.isascii() and currency.isalpha() else currency)


def _is_currency(mark: str) -> bool:
    """Return whether a text is a sign, perhaps with the letters of a country, or a code of three letters."""
    if len(mark) == 3 and mark.isascii() and mark.isalpha():
        return True
    signs = [letter for letter in mark if _is_sign(letter)]
    return len(mark) <= SIGNS and len(signs) == 1 and all(_is_sign(one) or one.isalpha() for one in mark)


def _is_sign(letter: str) -> bool:
    return unicodedata.category(letter) == "Sc"
