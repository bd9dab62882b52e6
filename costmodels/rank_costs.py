"""Seconds and bytes of pipeline ranks, each with the device, links and constants of its kind of node."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import (
    UnitSizes,
    end_parameters,
    frozen_parameters,
    rank_parameters,
    row_unit_sizes,
)
from costmodels.ranks.rank_layers import FIELDS, ZERO, Ranks, all_ranks, critical_ranks, ranks_entry
from costmodels.ranks.reductions import parts_of_rank, parts_total
from costmodels.ranks.sites import MIXED, Site, decisive_site, rank_kinds, site_values, sites
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable, distinct_numbers
from costmodels.time.data_parallel import accumulation_seconds
from costmodels.time.gemms import sums_in_gemms
from costmodels.time.passes import Passes
from costmodels.time.unit_times import part_seconds, unit_passes


class Accumulation(NamedTuple):
    """Seconds of gradient accumulation per parameter, [n] each."""

    each: Floats
    """Seconds of each microbatch."""
    once: Floats
    """Seconds of a step, besides."""
    linear_each: Floats
    """Seconds of each microbatch beyond `each`, of parameters of layers outside of routed experts."""
    linear_once: Floats
    """Seconds of a step beyond `once`, of the same parameters."""


@dataclass(frozen=True)
class RankCosts:
    """Costs of the pipeline ranks of the rows of a table.

    Dictionaries by the index of a site (`costmodels.ranks.sites.sites`) have the costs of ranks as if all
    were on that site.
    """

    model: ModelSpec
    cluster: Cluster
    engine: Engine
    """The catalogue's engine; `Engine.for_device` is applied here."""
    table: LayoutTable
    ranks: Ranks
    """The pipeline ranks, [n, k]."""
    kind: Ints
    """Kind of node of each rank, [n, k]: 0, 1 or `MIXED`."""

    @classmethod
    def of(cls, model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> RankCosts:
        """The costs of the ranks that can be slowest or fullest."""
        return cls(model, cluster, engine, table, *critical_ranks(model, table, cluster))

    @classmethod
    def of_all(
        cls, model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, row: int
    ) -> RankCosts:
        """The costs of all pipeline ranks of one row, [1, pp]."""
        ranks = all_ranks(*ranks_entry(model, table, row)).each(lambda column: column[None, :])
        kind = rank_kinds(cluster, int(table.pipeline_parallel[row]))[None, :]
        return cls(model, cluster, engine, table.take(np.array([row])), ranks, kind)

    def with_ranks(self, ranks: Ranks) -> RankCosts:
        """The costs with other ranks on the same kinds of nodes."""
        other = replace(self, ranks=ranks)
        # Arrays that do not depend on the ranks are kept.
        vars(other).update({name: getattr(self, name) for name in ("sites", "codes", "shapes", "sizes")})
        return other

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Sites that ranks may be on."""
        return sites(self.cluster, self.engine)

    @cached_property
    def codes(self) -> list[int]:
        """Indices of the sites that the rows have."""
        if len(self.sites) == 1:
            return [0]
        kinds = distinct_numbers(self.kind) or [0]
        return [*kinds, MIXED + 1] if MIXED in kinds else kinds

    @cached_property
    def shapes(self) -> tuple[LayoutTable, Ints]:
        """The few rows that differ in shape, and for each row the index of its equal (`distinct_shapes`)."""
        return distinct_shapes(self.table)

    @cached_property
    def units(self) -> dict[int, dict[str, Passes]]:
        """`unit_passes` on each site."""
        return {
            code: unit_passes(self.model, self.sites[code].cluster, self.sites[code].engine, self.shapes[0])
            for code in self.codes
        }

    @cached_property
    def sizes(self) -> dict[int, UnitSizes]:
        """`row_unit_sizes` with the engine of each site."""
        return {
            code: row_unit_sizes(self.model, self.sites[code].engine, *self.shapes) for code in self.codes
        }

    @cached_property
    def parameters(self) -> tuple[Floats, Floats]:
        """Parameters of each rank outside routed experts and in routed experts, [n, k]."""
        return rank_parameters(self.sizes[self.codes[0]], self.ranks)

    @cached_property
    def frozen(self) -> tuple[Floats, Floats]:
        """Frozen parameters of each rank under adapters, in the form of `parameters`, [n, k]."""
        return frozen_parameters(self.sizes[self.codes[0]], self.ranks)

    @cached_property
    def accumulation(self) -> dict[int, Accumulation]:
        """Seconds of gradient accumulation on each site."""
        found = {}
        for code in self.codes:
            site, has_experts = self.sites[code], self.model.experts > 0
            every, linear = (
                accumulation_seconds(site.engine, site.cluster.device, self.table, has_experts, in_linear)
                for in_linear in (False, self.model.lora is None)
            )
            more = linear[0] - every[0], linear[1] - every[1]
            found[code] = Accumulation(*every, *more)
        return found

    @cached_property
    def summation(self) -> dict[int, Floats]:
        """Seconds of gradient accumulation of a microbatch outside GEMMs on each site, [n, k]."""
        shared, experts = self.parameters

        def seconds(code: int, times: Accumulation) -> Floats:
            ends = end_parameters(self.sizes[code], self.ranks)
            if sums_in_gemms(self.sites[code].engine):
                return self.ranks.first * self.sizes[code].embedding[:, None] * times.each[:, None]
            return (shared + experts) * times.each[:, None] + (shared - ends) * times.linear_each[:, None]

        return {code: seconds(code, times) for code, times in self.accumulation.items()}

    @cached_property
    def site(self) -> Ints:
        """Index of the site that decides the time of each rank, [n, k]; with both kinds of nodes, the slower
        one."""
        if len(self.codes) == 1:
            return self.kind
        _, shape = self.shapes
        return decisive_site(
            self.kind,
            lambda code: part_seconds(self.units[code], self.ranks, shape, "total") + self.summation[code],
        )

    def at(self, index: Any = np.s_[:]) -> RankSeconds:
        """Seconds of some of the ranks.

        Args:
            index: the selected ranks, as an index into arrays of shape [n, k]; all unless given.
        """
        rows = index[0] if isinstance(index, tuple) else index
        ranks = self.ranks.each(lambda column: column[index])
        return RankSeconds(self, index, ranks, self.site[index], self.shapes[1][rows])

    @cached_property
    def parts(self) -> dict[int, dict[str, Floats]]:
        """Bytes by the field of `StageMemory` on each site, which broadcast to [n, k]."""
        found = {}
        for code, sizes in self.sizes.items():
            site = self.sites[code]
            parts = stage_memory(site.cluster, site.engine, self.table, sizes, self.ranks)
            found[code] = parts | {"absent": ZERO + site.absent}
        return found

    @cached_property
    def totals(self) -> dict[int, Floats]:
        """The sum of `parts`, [n, k]."""
        return {code: parts_total(parts) for code, parts in self.parts.items()}

    @cached_property
    def memory_site(self) -> Ints:
        """Index of the site that decides the memory of each rank, [n, k]; with both kinds of nodes, the
        fuller one."""
        if len(self.codes) == 1:
            return self.kind
        return decisive_site(self.kind, lambda code: self.totals[code])

    @cached_property
    def bytes(self) -> Floats:
        """Bytes that a device of each rank needs, [n, k], including the memory that it has less than other
        devices."""
        return site_values(self.memory_site, self.codes, lambda code: self.totals[code])

    @property
    def memory(self) -> dict[str, Floats]:
        """Bytes by the field of `StageMemory`, which broadcast to [n, k]."""
        return self._memory(self.memory_site, self.parts)

    def memory_of(self, rank: Ints) -> dict[str, Floats]:
        """Bytes of one rank of each row by the field of `StageMemory`, [n] each.

        Args:
            rank: the rank's place in the row, [n].
        """
        site = self.memory_site[np.arange(len(rank)), rank]
        return self._memory(site, {code: parts_of_rank(parts, rank) for code, parts in self.parts.items()})

    def _memory(self, site: Ints, parts: dict[int, dict[str, Floats]]) -> dict[str, Floats]:
        names = parts[self.codes[0]]
        return {name: site_values(site, self.codes, partial(_part, parts, name)) for name in names}


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of one microbatch on some ranks, selected by an index into arrays of shape [n, k]."""

    costs: RankCosts
    index: Any
    ranks: Ranks
    """The selected ranks; their arrays have the shape of all results."""
    site: Ints
    """Index of the site of each selected rank."""
    shape: Ints
    """Index into `RankCosts.shapes` for each row."""

    def part(self, name: str) -> Floats:
        """Seconds of a part of `Passes`, or of `parts_total`, without gradient accumulation."""
        units = self.costs.units
        return site_values(
            self.site, self.costs.codes, lambda code: part_seconds(units[code], self.ranks, self.shape, name)
        )

    @property
    def summation(self) -> Floats:
        """Seconds of gradient accumulation, at the end of the microbatch's backward pass."""
        return site_values(self.site, self.costs.codes, lambda code: self.costs.summation[code][self.index])

    @property
    def total(self) -> Floats:
        """Seconds of forward and backward pass."""
        return self.part("total") + self.summation

    @property
    def backward(self) -> Floats:
        """Seconds of the backward pass."""
        return self.part("backward") + self.summation


UNITS = ("dense", "moe", "first", "last")
"""Units of a model by the field of `Ranks` that counts them: layers of both kinds, embedding and head."""


def unit_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Seconds of one microbatch in each of `UNITS` on each kind of node, [n, kinds, units].

    Gradient accumulation is included; on nodes of two kinds the last of the kinds is `MIXED`.
    """
    kinds = MIXED + 1 if cluster.parts else 1
    alone = {
        name: np.tile(np.eye(len(UNITS))[place], (len(table), kinds)) for place, name in enumerate(UNITS)
    }
    if not model.experts:
        # There is no such layer to price.
        alone["moe"] = ZERO
    others = {name: ZERO for name in FIELDS if name not in ("count", *UNITS)}
    kind = np.repeat(np.arange(kinds), len(UNITS))[None, :] + np.zeros((len(table), 1), dtype=np.int64)
    ranks = Ranks(count=np.ones(kind.shape), **alone, **others)
    costs = RankCosts(model, cluster, engine, table, ranks, kind)
    return costs.at().total.reshape(len(table), kinds, len(UNITS))


def _part(parts: dict[int, dict[str, Floats]], name: str, code: int) -> Floats:
    return parts[code][name]
