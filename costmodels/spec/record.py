"""The base of all records of the vocabulary."""

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST_COUNT = 2**53
"""Largest count: up to here floating-point numbers represent all integers exactly."""

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
"""An integer of at least one."""

CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
"""An integer that may be zero."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above zero."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number of at least zero."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A share of a whole, 0 to 1."""

MOST_DEVICES = 2**24
"""Most devices of one job, so that tables of ranks fit into memory."""

Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
"""A number of devices."""

Name = Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A one-line text that is safe in commands and on terminals."""

Sentence = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A one-line text of limited length."""


GIB = 2.0**30
"""Bytes of one GiB, the unit of printed memory sizes."""


def in_seconds(seconds: float) -> str:
    """A time with three digits, or with all digits before the decimal point: `18.0 s`, `1,234 s`, `4.52
    ms`."""
    number, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    digits = 2 - math.floor(math.log10(number)) if number else 0
    return f"{number:,.{min(3, max(0, digits))}f} {unit}"


class Record(BaseModel):
    """A frozen, validated record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)
