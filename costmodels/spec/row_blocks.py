"""Computation of large tables in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from costmodels.spec.table import Ints, LayoutTable

BLOCK = 16384
"""Rows of a block, so that intermediate arrays stay small for tables of any length."""

ResultT = TypeVar("ResultT")


def block_results(
    compute: Callable[[LayoutTable], ResultT], table: LayoutTable, rows: Ints | None = None
) -> Iterator[ResultT]:
    """Results of `compute` for each block of a table, in order; for an empty table, the result for no rows.

    Args:
        rows: the wanted rows; all unless given.
    """
    for start in range(0, max(len(table) if rows is None else len(rows), 1), BLOCK):
        some = slice(start, start + BLOCK)
        yield compute(table.take(some if rows is None else rows[some]))
