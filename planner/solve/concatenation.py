"""Concatenation of tables of layouts and of their prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.pricing import Prices
from costmodels.spec.table import ARRAY_FIELDS, LayoutTable, numbered_splits


def concatenate_tables(tables: Sequence[LayoutTable]) -> LayoutTable:
    """The rows of all tables, in order; all must have the same number formats."""
    tables = [table for table in tables if len(table)] or tables[:1]
    if len(tables) == 1:
        return tables[0]
    splits, places = numbered_splits(split for table in tables for split in table.splits)
    ends = np.cumsum([len(table.splits) for table in tables])
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(table, name) for table in tables]) for name in ARRAY_FIELDS
    }
    columns["split"] = np.concatenate(
        [own[table.split] for own, table in zip(np.split(places, ends[:-1]), tables, strict=True)]
    )
    return LayoutTable(**columns, splits=splits, **tables[0].formats)


def concatenate_prices(parts: Sequence[Prices]) -> Prices:
    """The prices of all parts, in order; all must be of one model, cluster and engine."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        time={name: np.concatenate([part.time[name] for part in parts]) for name in parts[0].time},
        memory={name: np.concatenate([part.memory[name] for part in parts]) for name in parts[0].memory},
        simulated=np.concatenate([part.simulated for part in parts]),
        table=concatenate_tables([part.table for part in parts]),
    )


def without_repeats(parts: Sequence[Prices], listed: Prices | None = None) -> list[Prices]:
    """The parts without layouts that are listed, or that occur in an earlier part or row."""
    known = set() if listed is None else set(_keys(listed.table))
    found: list[Prices] = []
    for part in parts:
        keys = _keys(part.table)
        first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        new = sorted(place for key, place in first.items() if key not in known)
        known |= first.keys()
        found.append(part if len(new) == len(part) else part.take(np.array(new, dtype=np.int64)))
    return [part for part in found if len(part)]


def _keys(table: LayoutTable) -> list[tuple[Any, ...]]:
    """Each row as a tuple, in which equal splits of different tables are equal."""
    columns = [getattr(table, name).tolist() for name in ARRAY_FIELDS if name != "split"]
    splits = [table.splits[split] for split in table.split.tolist()]
    return list(zip(*columns, splits, strict=True))
