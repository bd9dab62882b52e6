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


def most_fitting(fits: Callable[[Ints], Bools], low: Ints, high: Ints) -> Ints:
    """The largest counts from `low` to `high` that fit, which `low` are taken to do."""
    while (low < high).any():
        middle = (low + high + 1) // 2
        met = fits(middle)
        low, high = np.where(met, middle, low), np.where(met, high, middle - 1)
    return low
