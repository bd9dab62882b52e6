"""Global batches that grow while a run goes on (Megatron-LM's num_microbatches_calculator.py)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.rules import first_illegal

FLAG = "--rampup-batch-size"


@dataclass(frozen=True)
class BatchRamp:
    """Sequences of each global batch: `start`, and `increment` more at even distances until `full`.

    Args:
        samples: sequences after which the batch is full; each size is used for an even share of them.
    """

    start: int
    increment: int
    samples: int
    full: int

    def at(self, consumed_samples: int) -> int:
        """Sequences of the global batch that follows `consumed_samples`."""
        steps = (self.full - self.start) // self.increment
        if not steps or consumed_samples > self.samples:
            return self.full
        return self.start + int(consumed_samples / (self.samples / steps)) * self.increment

    def sizes(self) -> range:
        """All sizes, the first to the full one."""
        return range(self.start, self.full + 1, self.increment)

    def total(self, iterations: int) -> int:
        """Sequences of the first `iterations` batches."""
        consumed = 0
        for done in range(iterations):
            if consumed > self.samples:
                return consumed + (iterations - done) * self.full
            consumed += self.at(consumed)
        return consumed


def batch_ramp(numbers: tuple[int, int, int] | None, layout: Layout) -> BatchRamp:
    """The ramp that `--rampup-batch-size` describes, up to the batch of `layout`; all alike without one.

    Raises:
        InputError: the numbers do not lead to the batch of `layout`.
    """
    full = layout.global_batch_size
    if numbers is None:
        return BatchRamp(full, 1, 0, full)
    start, increment, samples = numbers
    if start > full or (full - start) % increment:
        raise InputError(
            f"{FLAG} {start} {increment} {samples}: batches of {start} do not grow by {increment} to the "
            f"plan's global batch size {full}; give a start below it and an increment that divides the "
            "difference"
        )
    return BatchRamp(start, increment, samples, full)


def check_ramp(ramp: BatchRamp, spec: ModelSpec, layout: Layout) -> None:
    """Raise `InputError` when `layout` cannot run one of the sizes of `ramp`."""
    for size in ramp.sizes():
        try:
            one = Layout.model_validate({**layout.model_dump(), "global_batch_size": size})
        except ValidationError as error:
            reason: str | None = error.errors()[0]["msg"].replace("Value error, ", "")
        else:
            reason = first_illegal(spec, one)
        if reason is not None:
            raise InputError(
                f"{FLAG} has a batch of {size} that the layout cannot run: {reason}; give other sizes, or "
                "pin the layout (--micro-batch-size 1)"
            )
