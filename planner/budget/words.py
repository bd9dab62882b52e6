"""Numbers of a training run in words: days, devices' hours, sums of money."""

from __future__ import annotations

DAY = 86400.0
"""Seconds of a day."""

SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
"""Suffixes of large numbers, as `--tokens` takes them."""

UNITS = (("days", DAY), ("hours", 3600.0), ("minutes", 60.0))


def scaled_number(number: float) -> str:
    """A count or a sum of money such as `15.6T`, `33.8M` or `4,096`."""
    for scale, suffix in SCALES:
        if number >= scale:
            return f"{short_number(number / scale)}{suffix}"
    return short_number(number)


def short_number(number: float) -> str:
    """A number with three digits, or with all digits before the decimal point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """A duration in words, from seconds, in a suitable unit."""
    for unit, length in UNITS:
        if seconds >= 2 * length:
            return f"{short_number(seconds / length)} {unit}"
    return f"{seconds:.3g} s"
