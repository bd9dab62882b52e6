"""Bounds of the numbers of flags: declared with the flag, and checked by one function for every command."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.errors import InputError

MOST = 10**15
"""Upper bound of any number; larger ones are typing errors, and too close to the 64-bit limit."""

MOST_STEPS = 10**8
"""Upper bound of iterations: a hundred times the longest training."""


@dataclass(frozen=True)
class Bounds:
    """Numbers from `least` to `most` and their description; never NaN or infinite."""

    words: str
    least: float
    most: float = MOST
    above: bool = False
    """True if `least` itself is not allowed."""
    below: bool = False
    """True if `most` itself is not allowed."""

    def __contains__(self, value: float) -> bool:
        """Return whether `value` is within the bounds."""
        low = self.least < value if self.above else self.least <= value
        return low and (value < self.most if self.below else value <= self.most)

    def describe(self, value: float) -> str:
        """The values that a flag accepts, for the message about `value`."""
        too_large = value > self.most and not math.isinf(value) and str(self.most) not in self.words
        return f"{self.words}, and at most {self.most:g}" if too_large else self.words


AT_LEAST_1 = Bounds("at least 1", 1)
STEPS = Bounds("at least 1", 1, MOST_STEPS)
OFF_OR_STEPS = Bounds("0 (off) or positive", 0, MOST_STEPS)
NOT_NEGATIVE = Bounds("at least 0", 0)
OFF_OR_POSITIVE = Bounds("0 (off) or positive", 0)
POSITIVE = Bounds("positive", 0, above=True)
SHARE = Bounds("at least 0 and below 1", 0, 1, below=True)


def check_bounds(group: Any) -> None:
    """Raise `InputError` where a field of `group`, a dataclass of flags, is not within its bounds."""
    for field in dataclasses.fields(group):
        bounds, value = field.metadata.get("within"), getattr(group, field.name)
        if bounds is not None and value is not None and value not in bounds:
            name = (field.metadata.get("names") or ("--" + field.name.replace("_", "-"),))[0]
            raise InputError(f"{name} {reprlib.repr(value)}: must be {bounds.describe(value)}")
