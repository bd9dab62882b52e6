"""Large tables, computed some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from costmodels.spec.table import Ints, LayoutTable

BLOCK = 16384
"""Rows at a time, so that intermediate arrays stay small however long the table."""

ResultT = TypeVar("ResultT")


def block_results(
    compute: Callable[[LayoutTable], ResultT], table: LayoutTable, rows: Ints | None = None
) -> Iterator[ResultT]:
    """Results of `compute` for each block of a table, in order; of an empty table, for no rows.

    Args:
        rows: those that are asked for; all unless given.
    """
    for start in range(0, max(len(table) if rows is None else len(rows), 1), BLOCK):
        some = slice(start, start + BLOCK)
        yield compute(table.take(some if rows is None else rows[some]))
