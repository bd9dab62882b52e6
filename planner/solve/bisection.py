"""Bisection of many rows at once, by a condition that holds on one side of each answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.spec.table import Bools, Floats, Ints


def least_number(enough: Callable[[Floats], Bools], low: Floats, high: Floats, close: float) -> Floats:
    """The least numbers that are enough, of which `high` are, and `low` may not be.

    Args:
        close: their relative error.
    """
    while (high - low > close * high).any():
        middle = (low + high) / 2
        met = enough(middle)
        low, high = np.where(met, low, middle), np.where(met, middle, high)
    return high


def fewest_enough(enough: Callable[[Ints], Bools], low: Ints, high: Ints) -> Ints:
    """The least counts from `low` to `high` that are enough, which `high` are taken to be."""
    while (low < high).any():
        middle = (low + high) // 2
        met = enough(middle)
        low, high = np.where(met, low, np.minimum(middle + 1, high)), np.where(met, middle, high)
    return high


def most_within(measure: Callable[[Ints], Floats], limit: float, low: Ints, high: Ints) -> Ints:
    """The largest counts from `low` to `high` whose measure is within the limit, which that of `low` is taken
    to be.

    Args:
        measure: function of counts that grows with them: along a line, or the largest of a few.
    """
    below, above = measure(low), measure(high)
    low = np.where(above <= limit, high, low)
    turn = 0
    while (open_places := high - low > 1).any():
        turn += 1
        # The crossing of a line with the limit is almost always the answer.
        share = (limit - below) / np.where(above > below, above - below, 1.0) if turn % 3 else 0.5
        probe = np.clip(low + np.floor(share * (high - low)).astype(np.int64), low + 1, high - 1)
        probe = np.where(open_places, probe, low)
        found = measure(probe)
        within, beyond = open_places & (found <= limit), open_places & (found > limit)
        low, below = np.where(within, probe, low), np.where(within, found, below)
        high, above = np.where(beyond, probe, high), np.where(beyond, found, above)
    return low
