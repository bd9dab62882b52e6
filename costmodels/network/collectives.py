"""Seconds of collectives on the network tiers that a group spans.

Ranks are placed in the order tp, cp, dp, pp (`Layout`), so a group is `size` ranks at a distance of `stride`.
Costs are alpha-beta (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005): every rank sends (size - 1)/size of
the payload once in an all-gather or a reduce-scatter, twice in an all-reduce.
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from costmodels.dataclass import dataclass
from costmodels.network.network_table import Rates, table_rates
from costmodels.network.topology import Tier, group_span, tiers
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Collective
from costmodels.spec.table import Bools, Floats, Ints

TREE = 0.92
"""Bandwidth of NCCL's double binary trees over that of its rings (src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Placement:
    """Groups on the tiers of a cluster."""

    cluster: Cluster
    engine: Engine
    size: Ints
    stride: npt.NDArray[np.int64]

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of the cluster, the innermost first."""
        return tiers(self.cluster)

    @cached_property
    def home(self) -> int:
        """Index of the last tier that needs no network: an island or a node, whichever is larger."""
        return sum(not tier.between_nodes for tier in self.tiers) - 1

    @cached_property
    def rates(self) -> list[float]:
        """Bytes per second that a large collective reaches on a device's share of each tier."""
        engine = self.engine
        return [
            tier.bandwidth
            * (engine.network.between_nodes if tier.between_nodes else engine.network.efficiency)
            for tier in self.tiers
        ]

    @cached_property
    def spans(self) -> list[tuple[Ints, Ints]]:
        """The fewest ranks of a group in a block of each tier, and the most blocks that it touches."""
        world = self.cluster.world_size
        return [group_span(world, tier.reach, self.size, self.stride) for tier in self.tiers]

    def crosses(self, below: Tier, tier: Tier) -> Bools:
        """Groups with neighbours in different blocks of a tier, [n]; these neighbours communicate over the
        tier above."""
        apart: Bools = (self.size > 1) & (below.reach % (self.size * self.stride) != 0)
        # Farther neighbours than a node is wide have no use for the way through the host.
        return apart if tier.between_nodes else apart & (self.stride < tier.reach)

    @cached_property
    def fast(self) -> Floats | float:
        """Bytes per second in an island: the whole bandwidth behind a switch, the wires between members in a
        mesh."""
        wires = self.tiers[0].wires
        if not wires:
            return self.rates[0]
        result: Floats = self.rates[0] * np.maximum(self.spans[0][0] - 1, 1) / wires
        return result

    @cached_property
    def inside(self) -> Floats:
        """Bytes per second of a ring inside islands and nodes; infinite where it has no link there."""
        several, island = self.size > 1, self.tiers[0].reach
        result: Floats = np.where(several & (self.stride < island), self.fast, np.inf)
        if self.home:
            through = np.minimum(result, self.spans[0][0] * self.rates[1])
            result = np.where(self.crosses(*self.tiers[:2]), through, result)
        return result

    @cached_property
    def outside(self) -> Floats | float:
        """Bytes per second of a ring on the network: a ring leaves a block through the network shares of its
        ranks in the block."""
        result: Floats | float = np.inf
        for tier in range(self.home + 1, len(self.tiers)):
            local, blocks = self.spans[tier - 1]
            result = np.minimum(result, np.where(blocks > 1, local * self.rates[tier], np.inf))
        return result

    def measured(self, collective: Collective) -> Rates:
        """Rates of `collective` by the cluster's table."""
        cluster = self.cluster
        return table_rates(
            cluster.measured, collective, self.tiers[self.home].reach, cluster.devices_per_node
        )

    def ring(self, collective: Collective) -> Floats:
        """Bytes per second that one rank passes on in a ring: measured, or else from the links."""
        inside, outside = self.inside, self.outside
        if self.cluster.measured:
            local, blocks = self.spans[self.home]
            table = self.measured(collective)
            inside = np.where(inside < np.inf, table.inside(np.maximum(local, 2), inside), np.inf)
            outside = np.where(blocks > 1, local * table.outside(blocks, local, outside / local), np.inf)
        result: Floats = np.where(self.size > 1, np.minimum(inside, outside), self.rates[0])
        return result

    def exchange(self) -> Floats:
        """Seconds for each byte of an all-to-all; its parts travel on all tiers at the same time."""
        size = self.size
        if self.cluster.measured:
            local, blocks = self.spans[self.home]
            table = self.measured("all_to_all")
            share = np.where(blocks > 1, self.outside / local, np.inf)
            within = (local - 1) / table.inside(np.maximum(local, 2), self.inside)
            return np.maximum(within, (size - local) / table.outside(blocks, local, share)) / size
        result: Floats = (self.spans[0][0] - 1) / self.fast
        for tier in range(1, len(self.tiers)):
            result = np.maximum(result, (size - self.spans[tier - 1][0]) / self.rates[tier])
        return result / size

    def messages(self) -> tuple[Floats | float, Floats | float]:
        """Bytes per second of a message to a rank of the same island, and to the farthest neighbour.

        A table gives messages by its rows with one rank on each of two nodes, or by the nearest rows.
        """
        near: Floats | float = self.rates[0] / max(self.tiers[0].wires, 1)
        far = near
        for below, tier, rate in zip(self.tiers, self.tiers[1:], self.rates[1:], strict=False):
            way_out: Floats | float = rate
            if tier.bandwidth < tier.cards:
                # Only `stride` ranks of a pod have their neighbour outside, and share its way out.
                spare = np.minimum(below.reach / self.stride, tier.cards / tier.bandwidth)
                way_out = rate * np.maximum(spare, 1.0)
            way_out = np.minimum(far, way_out)
            far = way_out if len(self.tiers) == 2 else np.where(self.crosses(below, tier), way_out, far)
        if self.cluster.measured:
            two, one = np.full(1, 2), np.ones(1, dtype=np.int64)
            table = self.measured("send")
            if table.within is not None:
                near = table.inside(two, np.zeros(1))
            far = table.outside(two, one, np.asarray(far))
        return near, far

    def lag(self, collective: Collective) -> Floats | float:
        """Measured seconds of a tiny call; 0 without a table.

        In a node, `call` is added, as the links' own latency is only a part of it.
        """
        if not self.cluster.measured:
            return 0.0
        local, blocks = self.spans[self.home]
        table = self.measured(collective)
        lag = table.lag(blocks, local)
        if table.late_within is not None:
            lag = lag + np.where(blocks > 1, 0.0, self.call)
        return np.where(self.size > 1, lag, 0.0)

    @cached_property
    def tells_calls(self) -> bool:
        """True if a table has seconds of calls in a node. With only one collective's rate in a table, latency
        comes from the engine's constants."""
        return bool(self.cluster.measured) and self.measured("all_reduce").late_within is not None

    @cached_property
    def call(self) -> Floats | float:
        """Seconds of every call besides its hops."""
        latency = self.engine.network.collective_latency
        return np.where(self.size > 1, latency, 0.0) if latency else 0.0

    @cached_property
    def near_hops(self) -> Floats:
        """Seconds of hops inside islands."""
        result: Floats = np.log2(self.size / self.spans[0][1]) * self.tiers[0].latency
        return result

    def ring_hops(self) -> Floats:
        """Seconds of the hops of a ring through all ranks."""
        result = self.near_hops
        for tier, (_, below), (_, above) in zip(self.tiers[1:], self.spans, self.spans[1:], strict=False):
            result = result + np.maximum(below - above, 0) * tier.latency
        return result

    def tree_hops(self) -> Floats:
        """Seconds of the hops of a tree through all ranks."""
        result = self.near_hops
        for tier, (_, below), (_, above) in zip(self.tiers[1:], self.spans, self.spans[1:], strict=False):
            result = result + np.log2(np.maximum(below / above, 1.0)) * tier.latency
        return result


@dataclass(frozen=True)
class Group:
    """A process group of each row; arrays of shape [n]. Quantities that only few collectives need are
    computed on demand."""

    size: Ints
    local: Ints
    """Ranks of the group in one island; the fewest if the group crosses a border between islands."""
    bandwidth: Floats
    """Bytes per second that one rank passes on in an all-gather's ring through all ranks."""
    latency: Floats
    """Seconds of one empty all-gather."""
    intra_bandwidth: Floats | float
    """Bytes per second of a message to another rank of the island."""
    inter_bandwidth: Floats | float
    """Bytes per second of a message to another island, between the most distant neighbours."""
    placement: Placement = field(repr=False)

    @property
    def islands(self) -> Ints:
        """Islands that a group touches; the most if the group crosses borders."""
        return self.placement.spans[0][1]

    @cached_property
    def scatter_bandwidth(self) -> Floats:
        """Bytes per second that one rank passes on in a reduce-scatter's ring."""
        return self.placement.ring("reduce_scatter") if self.placement.cluster.measured else self.bandwidth

    @cached_property
    def reduce_bandwidth(self) -> Floats:
        """Bytes per second of an all-reduce's ring; switches that reduce in the network make it faster."""
        return self.placement.ring("all_reduce") if self.placement.cluster.measured else self.bandwidth

    def wait(self, collective: Collective) -> Floats:
        """Seconds of `latency`, or the measured latency if it is longer."""
        result: Floats = np.maximum(self.latency, self.placement.lag(collective))
        return result

    @cached_property
    def tree_latency(self) -> Floats:
        """Seconds of one empty pass along a tree through all ranks."""
        return self.placement.tree_hops() + self.placement.call

    @cached_property
    def exchange(self) -> Floats:
        """Seconds of an all-to-all for each byte that a rank sends, its own part included."""
        return self.placement.exchange()


def group(cluster: Cluster, engine: Engine, size: Ints, stride: Ints | npt.NDArray[np.int64] | int) -> Group:
    """The groups of `size` ranks at a distance of `stride`.

    The worst-placed group counts, for example one with three of its four ranks in a node. Each rank of a
    group in a node drives a ring through its own share of the node's network cards; interleaved groups use
    the shares of the other ranks. A table of measured collectives replaces the links' bandwidth. Latency
    grows with the logarithm of the ranks in an island, and linearly with islands or nodes, as in NCCL's
    rings. For trees, which NCCL has only for all-reduces, that is a logarithm too. Every call also takes
    `engine.network.collective_latency`.
    """
    placed = Placement(cluster, engine, size, np.asarray(stride))
    near, far = placed.messages()
    return Group(
        size=size,
        local=placed.spans[0][0],
        bandwidth=placed.ring("all_gather"),
        latency=placed.ring_hops() + placed.call,
        intra_bandwidth=near,
        inter_bandwidth=far,
        placement=placed,
    )


def all_gather(members: Group, payload: Floats, calls: Floats | float = 1.0) -> Floats:
    """Seconds to gather `payload` bytes (the whole tensor, on every rank) in `calls` calls."""
    share = (members.size - 1) / members.size
    result: Floats = payload * share / members.bandwidth + calls * members.wait("all_gather")
    return result


def reduce_scatter(members: Group, payload: Floats, calls: Floats | float = 1.0) -> Floats:
    """Seconds to sum `payload` bytes of every rank so that each rank has a part of the sum: a reversed
    all-gather."""
    share = (members.size - 1) / members.size
    result: Floats = payload * share / members.scatter_bandwidth + calls * members.wait("reduce_scatter")
    return result


def all_reduce(members: Group, payload: Floats, calls: Floats | float = 1.0) -> Floats:
    """Seconds to sum `payload` bytes on every rank: the faster of a ring and a tree, as NCCL chooses.

    A ring is a reduce-scatter and an all-gather. A double binary tree passes on the whole payload twice, in
    fewer hops (Sanders, Speck, Traeff, Parallel Computing 35(12), 2009; latencies and bandwidth of both in
    NCCL's src/graph/tuning.cc).
    """
    sent, share = 2.0 * payload / members.reduce_bandwidth, (members.size - 1) / members.size
    once, least = members.placement.call, members.placement.lag("all_reduce")
    ring = sent * share + calls * np.maximum(2.0 * members.latency - once, least)
    tree = sent / TREE + calls * np.maximum(2.0 * members.tree_latency - once, least)
    result: Floats = np.minimum(ring, tree)
    return result


def all_to_all(members: Group, payload: Floats) -> Floats:
    """Seconds for every rank to send `payload` bytes, an equal part to each rank of the group.

    Parts within the node and parts to other nodes travel at the same time, each on its tier.
    """
    result: Floats = payload * members.exchange + members.wait("all_to_all")
    return result


def send(cluster: Cluster, engine: Engine, payload: Floats, size: Ints, stride: Ints) -> Floats:
    """Seconds of one message between neighbours of a group; the slowest pair counts."""
    placed = Placement(cluster, engine, size, stride)
    near, far = placed.messages()
    once = engine.network.collective_latency
    measured = placed.measured("send").late_within if cluster.measured else None
    # A message that was measured is no collective: what these take besides their hops is not in it.
    result = payload / near + (placed.tiers[0].latency + once if measured is None else measured[1][0])
    for below, tier in pairwise(placed.tiers):
        result = np.where(placed.crosses(below, tier), payload / far + tier.latency + once, result)
    return np.where(size > 1, result + engine.network.message_latency, 0.0)
