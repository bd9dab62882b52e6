"""Bisection of many rows at once, by a condition that holds on one side of each answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.spec.table import Bools, Floats, Ints


def least_number(enough: Callable[[Floats], Bools], low: Floats, high: Floats, close: float) -> Floats:
    """The least numbers that are enough; `high` must be enough, `low` may be too small.

    Args:
        close: relative error of the result.
    """
    while (high - low > close * high).any():
        middle = (low + high) / 2
        met = enough(middle)
        low, high = np.where(met, low, middle), np.where(met, middle, high)
    return high


def fewest_enough(enough: Callable[[Ints], Bools], low: Ints, high: Ints) -> Ints:
    """The least counts from `low` to `high` that are enough; `high` is assumed to be enough."""
    while (low < high).any():
        middle = (low + high) // 2
        met = enough(middle)
        low, high = np.where(met, low, np.minimum(middle + 1, high)), np.where(met, middle, high)
    return high


def most_within(measure: Callable[[Ints], Floats], limit: float, low: Ints, high: Ints) -> Ints:
    """The largest counts from `low` to `high` whose measure is within the limit; `low` is assumed to be
    within it.

    Args:
        measure: increasing function of counts: linear, or the maximum of a few linear ones.
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
