"""Sums over parts and extremes over pipeline ranks, of arrays that broadcast to [n, k]."""

from __future__ import annotations

import numpy as np

from costmodels.spec.table import Floats, Ints

FEW_COLUMNS = 16
"""Most columns that are compared one after the other, for all rows at once."""


def parts_total(parts: dict[str, Floats]) -> Floats:
    """The sum of parts that broadcast against each other, small ones first."""
    result: Floats = sum(sorted(parts.values(), key=np.size), np.zeros(()))
    return result


def row_maximum(held: Floats) -> Floats:
    """The largest number of each row of [n, k]; for few columns much faster than `max(axis=1)`."""
    if held.shape[1] > FEW_COLUMNS:
        return np.asarray(held.max(axis=1))
    found: Floats = held[:, 0].copy()
    for column in held.T[1:]:
        np.maximum(found, column, out=found)
    return found


def parts_of_rank(parts: dict[str, Floats], rank: Ints) -> dict[str, Floats]:
    """The parts of one pipeline rank of each row, [n] each, of arrays that broadcast to [n, k]."""
    rows = np.arange(len(rank))
    found: dict[str, Floats] = {}
    for name, held in parts.items():
        if held.shape[1] > 1:
            found[name] = held[np.minimum(rows, len(held) - 1), rank]
        else:
            found[name] = np.broadcast_to(held[:, 0], rows.shape)
    return found
