"""The first plans of the bundled engine, held to the exact bytes of its runtime's memory.

The search prices masses with the closed forms of `costmodels.memory`. `costmodels.tapes.player` plays
recordings of what the runtime allocates, which has the bytes of `planner dryrun`. Where the units of a layout
are recorded, it decides whether a plan fits, and estimates show it; elsewhere closed forms stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from costmodels.pricing import Prices
from costmodels.ranks.reductions import parts_of_rank, parts_total
from costmodels.ranks.sites import decisive_site, rank_kinds, site_values, sites
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from costmodels.tapes import player

ENGINE = "bundled"
"""The engine whose allocations are known."""

RankBytes = dict[str, Floats]
"""Bytes of every pipeline rank of one row by the fields of `StageMemory`, [1, pp] each."""


def has_exact_memory(cluster: Cluster, engine: Engine) -> bool:
    """Whether tapes are of what this engine runs on these devices."""
    return engine.name == ENGINE and cluster.device.kind != "cpu"


def verifiable(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Bools:
    """The rows whose exact bytes are known, as the runtime runs them on GPUs, [n]."""
    if not has_exact_memory(cluster, engine):
        return np.zeros(len(table), dtype=np.bool_)
    splits = table.runs(*SPLIT_BACKWARD).tolist()
    every = (player.plays(model, table.layout(row), not split) for row, split in enumerate(splits))
    return np.fromiter(every, dtype=np.bool_, count=len(table))


def _by_compilation(splits: Bools) -> Iterator[tuple[bool, Ints]]:
    """Rows whose layers are compiled, and rows with schedules that split backward, whose are not."""
    for compiled in (True, False):
        rows = np.flatnonzero(splits != compiled)
        if len(rows):
            yield compiled, rows


def exact_bytes(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> list[RankBytes]:
    """Bytes of every pipeline rank of each row.

    Args:
        table: rows that are `verifiable`.
    """
    if cluster.parts:
        return _on_kinds(model, cluster, engine, table)
    engine = engine.for_device(cluster.device)
    found: list[RankBytes] = [{}] * len(table)
    for compiled, rows in _by_compilation(table.runs(*SPLIT_BACKWARD)):
        held = player.stage_memory(model, cluster, engine, table.take(rows), compiled)
        for place, row in enumerate(rows.tolist()):
            ranks = int(table.pipeline_parallel[row])
            found[row] = {
                name: np.broadcast_to(array, (len(rows), max(ranks, array.shape[1])))[[place], :ranks]
                for name, array in held.items()
            }
    return found


def _on_kinds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> list[RankBytes]:
    """`exact_bytes` on nodes of two kinds: of each pipeline rank those on its own kind."""
    # Tensors are the same on all devices; what a device holds besides, and has, is not.
    kinds = sites(cluster, engine)
    every = [exact_bytes(model, one.cluster, one.engine, table) for one in kinds]
    found = []
    for row, pipeline in enumerate(table.pipeline_parallel.tolist()):
        absent = [np.full((1, pipeline), one.absent) for one in kinds]
        held = [each[row] | {"absent": less} for each, less in zip(every, absent, strict=True)]
        whole = [parts_total(parts) for parts in held]
        fuller = decisive_site(rank_kinds(cluster, pipeline)[None], whole.__getitem__)
        parts = {name: [each[name] for each in held] for name in held[0]}
        found.append(
            {name: site_values(fuller, range(len(kinds)), each.__getitem__) for name, each in parts.items()}
        )
    return found


def verify(prices: Prices, rows: Ints) -> tuple[Prices, Bools, list[RankBytes | None]]:
    """The prices with the exact bytes of those of `rows` that are verifiable, which of `rows` fit, and the
    bytes of their pipeline ranks, None where they are not known."""
    table = prices.table.take(rows)
    where = prices.model, prices.cluster, prices.engine
    known = np.flatnonzero(verifiable(*where, table))
    fits = np.ones(len(rows), dtype=np.bool_)
    found: list[RankBytes | None] = [None] * len(rows)
    if not len(known):
        return prices, fits, found
    memory = {name: held.copy() for name, held in prices.memory.items()}
    for place, parts in zip(known.tolist(), exact_bytes(*where, table.take(known)), strict=True):
        fullest = parts_total(parts).argmax(axis=1)
        for name, held in parts_of_rank(parts, fullest).items():
            memory[name][rows[place]] = held[0]
        fits[place] = parts_total(parts).max() <= prices.cluster.memory_bytes
        found[place] = parts
    return replace(prices, memory=memory), fits, found


def known_bytes(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> RankBytes | None:
    """The exact bytes of every pipeline rank of one layout; None where they are not known."""
    table = LayoutTable.of([layout])
    if not verifiable(model, cluster, engine, table)[0]:
        return None
    return exact_bytes(model, cluster, engine, table)[0]
