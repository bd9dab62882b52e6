"""Pipeline ranks on nodes of two kinds that can be slowest or fullest; equal ones share an entry."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from costmodels.ranks.pipeline import FIELDS, NONE, WORK, Entry, Ranks, all_ranks, ranks_entry
from costmodels.ranks.sites import kinds_of_ranks
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable, distinct


@lru_cache(maxsize=4096)
def _deciding(entry: Entry, kinds: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Rows of a kind and the fields of `Ranks`: those that can be slowest or fullest, in pipeline order."""
    every = all_ranks(*entry)
    rows = list(zip(kinds, *(getattr(every, name).tolist() for name in FIELDS), strict=True))
    kept_from = 2 + len(WORK)
    found: dict[tuple[float, ...], list[tuple[float, ...]]] = {}
    for row in rows:
        found.setdefault((row[0], *row[2:kept_from]), []).append(row[kept_from:])
    result = []
    for (kind, *work), flights in found.items():
        fullest = {
            flight
            for flight in flights
            if not any(other != flight and np.greater_equal(other, flight).all() for other in flights)
        }
        for place, flight in enumerate(sorted(fullest, reverse=True)):
            result.append((kind, 0.0 if place else float(len(flights)), *work, *flight))
    return tuple(result)


def deciding_ranks(model: ModelSpec, cluster: Cluster, table: LayoutTable) -> tuple[Ranks, Ints]:
    """The ranks that can be slowest or fullest, for every row of a table, and their kinds: [n, k] each.

    Entries stand for equal ranks of one kind; they come in the order of the first of these.
    """
    columns = [table.split, table.pipeline_parallel, table.schedule, table.recompute]
    first, code = distinct([*columns, table.recompute_method, table.recompute_num_layers])
    entries = []
    for row in first:
        entry = ranks_entry(model, table, int(row))
        entries.append(_deciding(entry, tuple(kinds_of_ranks(cluster, entry[1]).tolist())))
    filled = np.zeros((1 + len(FIELDS), len(entries), max(map(len, entries), default=1)))
    for index, found in enumerate(entries):
        filled[:, index, : len(found)] = np.transpose(found)
        # What fills up a row must not look like another kind.
        filled[0, index, len(found) :] = found[-1][0]
    return _as_ranks(filled[1:, code]), filled[0, code].astype(np.int64)


def _as_ranks(filled: Floats) -> Ranks:
    return Ranks(
        **{
            name: held if held.any() or name == "dense" else NONE
            for name, held in zip(FIELDS, filled, strict=True)
        }
    )
