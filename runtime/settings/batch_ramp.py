"""Global batches that grow during a run (Megatron-LM's num_microbatches_calculator.py)."""

from __future__ import annotations

import numpy as np

from costmodels import Layout, ModelSpec
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.table import Bools, Ints, LayoutTable
from planner.options.limits import MOST
from planner.space.rule import Rule
from planner.space.rules import RULES

FLAG = "--rampup-batch-size"

BATCH_RULES = [rule for rule in RULES if rule.name.startswith("batch_") or "micro_batches" in rule.name]
"""The rules about the size of a global batch."""


@dataclass(frozen=True)
class BatchRamp:
    """Sequences of each global batch: from `start` by steps of `increment` at equal distances to `full`.

    Args:
        samples: sequences after which the batch is full; each size is used for an equal share of them.
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
        """All sizes, from the first to the full one."""
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
    """The ramp of `--rampup-batch-size`, up to the batch of `layout`; constant without the flag.

    Raises:
        InputError: the numbers do not lead to the batch of `layout`.
    """
    full = layout.global_batch_size
    if numbers is None:
        return BatchRamp(full, 1, 0, full)
    start, increment, samples = numbers
    if not _leads_to(numbers, np.asarray(full)):
        raise InputError(_astray(numbers, full))
    return BatchRamp(start, increment, samples, full)


def check_numbers(numbers: tuple[int, int, int]) -> None:
    """Raise `InputError` for numbers that are not a ramp."""
    if min(numbers) < 1 or max(numbers) > MOST:
        words = " ".join(map(str, numbers))
        raise InputError(
            f"{FLAG} {words}: give three whole numbers above 0 and at most {MOST:g}, such as 16 8 5000"
        )


def _leads_to(numbers: tuple[int, int, int], full: Ints) -> Bools:
    start, increment, _ = numbers
    found: Bools = (start <= full) & ((full - start) % increment == 0)
    return found


def _astray(numbers: tuple[int, int, int], full: int) -> str:
    start, increment, _ = numbers
    return (
        f"{FLAG} {' '.join(map(str, numbers))}: batches of {start} do not grow by {increment} to the plan's "
        f"global batch size {full}; give a start below it and an increment that divides the difference"
    )


def ramp_rule(numbers: tuple[int, int, int]) -> Rule:
    """The rule that a layout can run every batch of the ramp.

    If the first two batches are whole microbatches, or whole rounds of them, all batches are, as they differ
    by the same number. Raises `InputError` for numbers that are not a ramp.
    """
    check_numbers(numbers)
    start, increment, _ = numbers

    def sizes(d: LayoutTable) -> list[tuple[int, Bools]]:
        """The sizes to check, and their places in the ramp."""
        every: Bools = np.asarray(True)
        return [(start, every), (start + increment, start + increment <= d.global_batch_size)]

    def broken(model: ModelSpec, d: LayoutTable) -> Bools:
        found = ~_leads_to(numbers, d.global_batch_size)
        for size, has in sizes(d):
            for rule in BATCH_RULES:
                found = found | (has & rule.broken(model, d.with_batch(size)))
        return found

    def message(model: ModelSpec, d: LayoutTable) -> str:
        if not _leads_to(numbers, d.global_batch_size):
            return _astray(numbers, int(d.global_batch_size))
        size, reason = next(
            (size, rule.message(model, d.with_batch(size)))
            for size, has in sizes(d)
            for rule in BATCH_RULES
            if has and rule.broken(model, d.with_batch(size))
        )
        return (
            f"{FLAG} has a batch of {size} that the layout cannot run: {reason}; give other sizes, or "
            "pin the layout (--micro-batch-size 1)"
        )

    return Rule("rampup_batch_size", broken, message)
