"""Seconds and bytes of layouts on nodes of two kinds: what `costmodels.pricing` is for nodes of one.

Each pipeline rank is priced with the device, the links and the engine's constants of the kind that runs it;
the slowest one decides, and each has the memory of its own device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from costmodels.layers.shapes import shapes_of
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import UnitSizes, end_parameters, parameters, sizes_of
from costmodels.ranks.mixed import deciding_ranks
from costmodels.ranks.pipeline import NONE, Ranks, all_ranks, ranks_entry
from costmodels.ranks.reductions import on_rank, total
from costmodels.ranks.sites import BOTH, Site, kinds_of_ranks, on_sites, sites, slower_site
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable, numbers
from costmodels.time.bubble import (
    bubble_seconds,
    held_seconds,
    message_seconds,
    send_seconds,
    split_bubble_seconds,
    uneven_bubble_seconds,
)
from costmodels.time.compute import PARTS, Passes
from costmodels.time.data_parallel import (
    accumulation_seconds,
    exchange_seconds,
    optimizer_seconds,
    orthogonal_seconds,
)
from costmodels.time.unit_times import on_ranks, units_of


@dataclass(frozen=True)
class Rows:
    """Rows of a table, and where their ranks are."""

    model: ModelSpec
    cluster: Cluster
    """Of two kinds."""
    engine: Engine
    """With its constants for all devices."""
    table: LayoutTable
    ranks: Ranks
    """[n, k]"""
    kind: Ints
    """[n, k], 0, 1 or `BOTH`."""

    @classmethod
    def of(cls, model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Rows:
        """The rows with the ranks that can decide."""
        return cls(model, cluster, engine, table, *deciding_ranks(model, cluster, table))

    def with_ranks(self, ranks: Ranks) -> Rows:
        """The same rows with other ranks on the same kinds."""
        other = replace(self, ranks=ranks)
        # What does not depend on the ranks is kept.
        kept = {name: getattr(self, name) for name in ("sites", "shapes", "codes", "sizes")}
        vars(other).update(kept)
        return other

    @cached_property
    def codes(self) -> list[int]:
        """Sites that the rows have."""
        kinds = numbers(self.kind) or [0]
        return [*kinds, BOTH + 1] if BOTH in kinds else kinds

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """As `costmodels.ranks.sites.sites` has them."""
        return sites(self.cluster, self.engine)

    @cached_property
    def shapes(self) -> tuple[LayoutTable, Ints]:
        """As `shapes_of` has them."""
        return shapes_of(self.table)

    @cached_property
    def units(self) -> dict[int, dict[str, Passes]]:
        """`units_of` on each site that the rows have."""
        return {
            code: units_of(self.model, self.sites[code].cluster, self.sites[code].engine, self.shapes[0])
            for code in self.codes
        }

    @cached_property
    def sizes(self) -> dict[int, UnitSizes]:
        """`sizes_of` with the engine of each site."""
        return {code: sizes_of(self.model, self.sites[code].engine, *self.shapes) for code in self.codes}

    @cached_property
    def parameters(self) -> tuple[Floats, Floats]:
        """As `costmodels.memory.unit_sizes.parameters` has them, [n, k]."""
        return parameters(next(iter(self.sizes.values())), self.ranks)

    @cached_property
    def adding(self) -> dict[int, tuple[Floats, Floats]]:
        """`accumulation_seconds` on each site."""
        return {
            code: accumulation_seconds(
                self.sites[code].engine,
                self.sites[code].cluster.device,
                self.table,
                self.model.experts > 0,
            )
            for code in self.codes
        }

    @cached_property
    def added(self) -> dict[int, Floats]:
        """Seconds in which a micro batch adds up its gradients on each site, [n, k]."""
        held = sum(self.parameters, np.zeros(()))
        return {code: held * adding[:, None] for code, (adding, _) in self.adding.items()}

    def alone(self, code: int, part: str) -> Floats:
        """Seconds of `part` of a micro batch were all ranks on one site, [n, k]."""
        return on_ranks(self.units[code], self.ranks, self.shapes[1], part)

    @cached_property
    def site(self) -> Ints:
        """Index of the site of each rank, [n, k]: of one with both kinds the slower."""
        return slower_site(self.kind, lambda code: self.alone(code, "total") + self.added[code])

    def seconds(self, part: str) -> Floats:
        """Seconds of `part` of a micro batch on each rank, [n, k]; in backward what adds up gradients too."""
        adds = part in ("total", "backward", "weights")
        return on_sites(self.site, lambda code: self.alone(code, part) + (self.added[code] if adds else 0.0))

    @cached_property
    def held(self) -> dict[int, dict[str, Floats]]:
        """Bytes by the field of `StageMemory` were all ranks on one site, which broadcast to [n, k]."""
        found = {}
        for code, sizes in self.sizes.items():
            site = self.sites[code]
            parts = stage_memory(site.cluster, site.engine, self.table, sizes, self.ranks)
            found[code] = parts | {"absent": NONE + site.absent}
        return found

    @cached_property
    def whole(self) -> dict[int, Floats]:
        """The sum of `held`."""
        return {code: total(parts) for code, parts in self.held.items()}

    @cached_property
    def fuller(self) -> Ints:
        """Index of the site of each rank, [n, k]: of one with both kinds the one that needs more."""
        return slower_site(self.kind, lambda code: self.whole[code])

    @cached_property
    def bytes(self) -> Floats:
        """Bytes that a device of each rank needs, [n, k], what it has less than others included."""
        return on_sites(self.fuller, lambda code: self.whole[code])

    def memory(self, rank: Ints) -> dict[str, Floats]:
        """Bytes of one pipeline rank of each row by the field of `StageMemory`, [n] each."""
        site = self.fuller[np.arange(len(rank)), rank]
        each = {code: on_rank(parts, rank) for code, parts in self.held.items()}
        return {name: on_sites(site, partial(_part, each, name)) for name in next(iter(each.values()))}


def _part(held: dict[int, dict[str, Floats]], name: str, code: int) -> Floats:
    return held[code][name]


def price_rows(rows: Rows) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Parts of the time and of the peak memory of each row, as `costmodels.pricing.price` has them."""
    table, ranks, every = rows.table, rows.ranks, np.arange(len(rows.table))
    rank_seconds = rows.seconds("total")
    slowest = rank_seconds.argmax(axis=1)
    micro_batches = table.micro_batches
    time = {part: micro_batches * rows.seconds(part)[every, slowest] for part in PARTS}
    added = on_sites(rows.site, lambda code: rows.added[code])[every, slowest]
    backward = rows.seconds("backward")
    after = backward[every, slowest]
    ahead = rank_seconds[every, slowest] - after
    bubble, spare, weights = _bubbles(rows, rank_seconds, backward, slowest)
    message, waits = boundary_seconds(rows.model, rows.cluster, rows.engine, table), _waits(rows)
    waiting = held_seconds(table, rank_seconds, ranks, message, waits)
    time["bubble"] = bubble
    time["pipeline_parallel"] = send_seconds(table, message, waiting, spare, ahead, after, weights, waits)
    once, time["data_parallel"], time["optimizer"] = _after_backward(rows, slowest, ahead, after)
    time["accumulation"] = np.maximum(micro_batches * added + once, 0.0)
    return time, rows.memory(rows.bytes.argmax(axis=1))


def _waits(rows: Rows) -> bool:
    return any(site.engine.waits_for_messages for site in rows.sites)


def boundary_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Seconds of one message from a stage of one kind to a stage of the other, [n]."""
    both = sites(cluster, engine)[BOTH:]
    return np.maximum(*(message_seconds(model, one.cluster, one.engine, table) for one in both))


def _after_backward(
    rows: Rows, slowest: Ints, forward: Floats, backward: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds of copies of gradients once a step, of data-parallel ranks, and of the optimizer, [n] each.

    Those of the site where they take longest together, which the others wait for.

    Args:
        slowest: the slowest rank.
        forward, backward: seconds of a micro batch on it, which the exchange hides behind.
    """
    found = np.zeros((3, len(rows.table)))
    shared, experts = rows.parameters
    layers = rows.ranks.layers[np.arange(len(slowest)), slowest]
    for code, site in enumerate(rows.sites):
        here: Bools = rows.site == code
        some = np.flatnonzero(here.any(axis=1))
        if not len(some):
            continue
        here, part, device = here[some], rows.table.take(some), site.cluster.device
        ends = end_parameters(rows.sizes[code], rows.ranks)
        held, expert, inner = (
            np.where(here, count[some], 0.0).max(axis=1) for count in (shared, experts, shared - ends)
        )
        window = layers[some], forward[some], backward[some]
        exchange = exchange_seconds(site.cluster, site.engine, part, held, expert, *window)
        update = optimizer_seconds(site.engine, device, part, held, expert)
        update += orthogonal_seconds(rows.model, site.cluster, site.engine, part, inner, expert)
        once = (held + expert) * rows.adding[code][1][some]
        own = np.stack([once, exchange, update])
        longer = own.sum(axis=0) > found[:, some].sum(axis=0)
        found[:, some] = np.where(longer, own, found[:, some])
    return found[0], found[1], found[2]


def _bubbles(
    rows: Rows, rank_seconds: Floats, backward: Floats, slowest: Ints
) -> tuple[Floats, Floats, Floats]:
    """As `costmodels.pricing` has them: bubble, spare seconds, gradients of weights of the slowest rank."""
    table, ranks = rows.table, rows.ranks
    chunks = table.virtual_pipeline_parallel
    bubble = bubble_seconds(rank_seconds, ranks.count, chunks.astype(np.float64), slowest)
    spare, weights_of_slowest = np.zeros(len(table)), np.zeros(len(table))
    alone = (chunks == 1) & (table.pipeline_parallel > 1)
    if alone.any():
        own = rank_seconds[alone]
        ahead = np.take_along_axis(own - backward[alone], slowest[alone][:, None], axis=1)[:, 0]
        some = ranks.each(lambda held: held[alone])
        # Behind a rank lie those that come later, whatever their layers.
        order = np.broadcast_to(-np.arange(own.shape[1], dtype=np.float64), own.shape)
        plain = dict.fromkeys(("moe", "dense_plain", "moe_plain"), NONE)
        some = replace(some, dense=order, last=np.zeros_like(own), first=np.zeros_like(own), **plain)
        bubble[alone] = uneven_bubble_seconds(own, ahead, some, slowest[alone])
    if (apart := table.runs(*SPLIT_BACKWARD)).any():
        weights = rows.seconds("weights")[apart]
        inputs = backward[apart] - weights
        ahead = rank_seconds[apart] - inputs - weights
        bubble[apart], spare[apart] = split_bubble_seconds(
            table.take(apart), ahead, inputs, weights, ranks.count[apart]
        )
        weights_of_slowest[apart] = np.take_along_axis(weights, slowest[apart][:, None], axis=1)[:, 0]
    return bubble, spare, weights_of_slowest


def rows_of_all_ranks(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, row: int
) -> Rows:
    """One row with all of its pipeline ranks, [1, pp]."""
    every = all_ranks(*ranks_entry(model, table, row)).each(lambda held: held[None, :])
    kinds = kinds_of_ranks(cluster, int(table.pipeline_parallel[row]))[None, :]
    return Rows(model, cluster, engine, table.take(np.array([row])), every, kinds)
