"""The sequences of one optimizer step."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.inputs.numbers import whole_number

MOST_SEQUENCES = 2**20
"""Most sequences of a step: ten times the largest published batches. Listing layouts of larger batches takes
minutes."""


@dataclass(frozen=True)
class Batch:
    """The sequences of one optimizer step: exactly `size`, or at most `size`."""

    size: int
    maximum: bool = False

    def __str__(self) -> str:
        return f"{'max_' if self.maximum else ''}global_batch_size {self.size}"


def resolve_batch(global_batch_size: int | None, max_global_batch_size: int | None) -> Batch:
    """The sequences of one step; exactly one of the two arguments must be given."""
    if global_batch_size is not None and max_global_batch_size is not None:
        raise InputError(
            f"global_batch_size {global_batch_size} and max_global_batch_size {max_global_batch_size}: "
            "give one of the two"
        )
    maximum = global_batch_size is None
    size = max_global_batch_size if maximum else global_batch_size
    if size is None:
        raise InputError("no batch size: give global_batch_size or max_global_batch_size")
    name = "max_global_batch_size" if maximum else "global_batch_size"
    return Batch(whole_number(name, size, MOST_SEQUENCES), maximum)
