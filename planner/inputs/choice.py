"""`Choice`: some of the values of a degree of freedom, such as `2..8`, `1,2,4` or all except forbidden
ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from costmodels.dataclass import dataclass
from costmodels.errors import InputError

Value = int | bool | str
AnyValue = TypeVar("AnyValue", bound=Value)

EXAMPLES = "such as 2..8, ..4 or 2,4"


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included; an end that is None is open."""

    low: int | None
    high: int | None

    def __contains__(self, value: object) -> bool:
        number = int(str(value))
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        return "..".join("" if end is None else str(end) for end in (self.low, self.high))


Values = Span | tuple[Value, ...]
"""A set of values that a degree may have."""


@dataclass(frozen=True)
class Choice:
    """The values that pins and bans leave for a degree."""

    wanted: Values | None = None
    """The wanted values; any if None."""
    forbidden: tuple[Values, ...] = ()

    def __contains__(self, value: object) -> bool:
        """Return whether a degree may have `value`."""
        wanted = self.wanted is None or value in self.wanted
        return wanted and not any(value in group for group in self.forbidden)

    def of(self, name: str, values: Iterable[AnyValue]) -> Sequence[AnyValue]:
        """The allowed ones of `values`, which are all values of degree `name` in the job.

        Raises `InputError` when none is allowed.
        """
        every = list(values)
        left = [value for value in every if value in self]
        if not left:
            known = ", ".join(map(str, every[:MOST_SHOWN])) + ", ..." * (len(every) > MOST_SHOWN)
            raise InputError(f"pin {name}={self}: leaves none of the values that this job has: {known}")
        return left

    def __str__(self) -> str:
        parts = [] if self.wanted is None else [_words(self.wanted)]
        parts += ["not " + _words(group) for group in self.forbidden]
        return " but ".join(parts)


MOST_SHOWN = 32
"""Most values of a degree that a message lists."""


def allowed_values(pins: Mapping[str, Any], name: str, values: Sequence[Any]) -> Sequence[Any]:
    """The members of `values` that a pin of degree `name` allows: the pinned value, those of a `Choice`, or
    all.

    Raises `InputError` when a `Choice` leaves none.
    """
    pin = pins.get(name)
    if isinstance(pin, Choice):
        return pin.of(name, values)
    return values if pin is None else (pin,)


def _words(group: Values) -> str:
    return str(group) if isinstance(group, Span) else ",".join(map(str, group))


def span(text: str) -> Span | None:
    """The range that `text` describes; None where it describes none.

    Examples:
        >>> span("2..8")
        Span(low=2, high=8)

    Raises `ValueError` for an end that is no whole number of at least 0, for no end, and for a range that
    holds no number.
    """
    low, dots, high = (part.strip() for part in text.partition(".."))
    if not dots:
        return None
    ends = [int(end) if end else None for end in (low, high)]
    if not all(end.isascii() and end.isdigit() for end in (low, high) if end) or ends == [None, None]:
        raise ValueError(text)
    found = Span(*ends)
    if found.low is not None and found.high is not None and found.low > found.high:
        raise ValueError(text)
    return found
