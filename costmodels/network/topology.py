"""Links between the devices of a cluster: a tree of tiers, its bandwidths in closed form, and its graph.

A device reaches its island (NVLink, HCCS) over the fast link, and the other islands of its node through the
host. It reaches other nodes over the node's network cards and a leaf switch for each rail (the cards with the
same place in every node). It reaches other pods over the spine, whose links may be oversubscribed. These are
the leaf-spine fabrics of NVIDIA's DGX SuperPOD reference architecture and of Gangidi et al., "RDMA over
Ethernet for distributed AI training at Meta scale", SIGCOMM 2024, section 3. Ranks fill nodes in order
(`Layout` has the order), so every tier joins blocks of neighbouring ranks, and a group is described by its
size and stride.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import Cluster
from costmodels.spec.table import Ints

if TYPE_CHECKING:
    import networkx

HOST_LATENCY = 5.7e-6
"""Seconds of a hop through the host: NCCL's figure for PCIe (src/graph/tuning.cc, hwLat, ring, Simple)."""

GRAPH_LIMIT = 16384
"""Most devices for which the graph is made; it is for viewing, not for pricing."""


@dataclass(frozen=True)
class Tier:
    """One level of the tree, as one device sees it."""

    name: str
    reach: int
    """Number of neighbouring ranks that the tier joins."""
    bandwidth: float
    """Bytes per second and direction: one device's share when all devices send at once."""
    latency: float
    """Seconds of one hop of a collective."""
    between_nodes: bool = False
    cards: float = 0.0
    """Bytes per second of one device's share of the network cards, an upper bound on tiers between nodes."""
    wires: int = 0
    """Number of wires that share the bandwidth if each pair of devices has a wire; 0 behind a switch."""


def island_ranks(cluster: Cluster) -> int:
    """Ranks of the job in one island.

    Schedulers give a job equal blocks of nodes of each island (Slurm's topology/block with --segment), so 256
    ranks on islands of 72 are four blocks of 64. If no block of at least half an island divides the job, its
    nodes are spread evenly over as few islands as possible.
    """
    world, local = cluster.world_size, cluster.devices_per_node
    joined = cluster.joined
    if world <= joined:
        return world
    if joined <= local:
        return next(size for size in range(joined, 0, -1) if local % size == 0)
    whole = joined // local
    for block in range(whole, (whole - 1) // 2, -1):
        if cluster.nodes % block == 0:
            return block * local
    islands = -(-cluster.nodes // whole)
    return -(-cluster.nodes // islands) * local


def pod_ranks(cluster: Cluster) -> int:
    """Ranks of the job in one pod; a pod of whole islands has the job's ranks of each of its islands."""
    world, local, joined = cluster.world_size, cluster.devices_per_node, cluster.joined
    if cluster.nodes_per_pod is None:
        return world
    ranks = cluster.nodes_per_pod * local
    if joined > local and ranks % joined == 0:
        ranks = ranks // joined * island_ranks(cluster)
    return min(ranks, world)


def tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of a cluster, the innermost first; the last one reaches all ranks."""
    world, local = cluster.world_size, cluster.devices_per_node
    fast, slow, device = cluster.fast_link, cluster.slow_link, cluster.device
    wires = max(cluster.joined, device.island or device.devices_per_node) - 1 if fast.wiring == "mesh" else 0
    found = [Tier(fast.name, island_ranks(cluster), fast.bandwidth, fast.latency, wires=wires)]
    node = min(local, world)
    if found[0].reach < node:
        found.append(Tier("host", node, min(device.host_bandwidth, fast.bandwidth), HOST_LATENCY))
    pod = pod_ranks(cluster)
    last = found[-1]
    if (
        not last.wires
        and slow.bandwidth >= last.bandwidth
        and slow.latency <= last.latency
        and pod > last.reach
    ):
        # A border between nodes whose links are no worse than those inside is none.
        found[-1] = Tier(last.name, pod, last.bandwidth, last.latency)
    network: Any = {"latency": slow.latency, "between_nodes": True, "cards": slow.bandwidth}
    if pod > found[-1].reach:
        found.append(Tier(slow.name, pod, slow.bandwidth, **network))
    if world > found[-1].reach:
        share = slow.bandwidth / cluster.oversubscription
        found.append(Tier(f"{slow.name} spine", world, share, **network))
    return tuple(found)


@lru_cache(maxsize=256)
def _divisors(unit: int) -> Ints:
    """Greatest common divisor of `unit` and each number below it."""
    result: Ints = np.gcd(unit, np.arange(unit))
    return result


def group_span(world: int, unit: int, size: Ints, stride: Ints) -> tuple[Ints, Ints]:
    """Spread of groups of `size` ranks, at a distance of `stride`, over blocks of `unit` neighbouring ranks.

    The groups of a layout tile all ranks, size x stride at a time, so block and group boundaries meet at
    every multiple of g = gcd(unit, size x stride): the worst-placed group has g // stride of its ranks in
    one of its blocks.

    Returns:
        The fewest ranks of a group in a block that it touches, and the most blocks that a group touches.
        Where `unit` does not divide `world`, these are bounds: a lower one, and an upper one.
    """
    if unit >= world:
        return size, np.ones_like(size)
    extent = size * stride
    common = _divisors(unit)[extent % unit]
    # Blocks are met latest by the group whose first rank lies farthest from the start of its block.
    first = unit - 1 - np.maximum(common - stride, 0)
    touched = (first + (size - 1) * stride) // unit + 1
    return np.maximum(common // stride, 1), np.minimum(touched, size)


def device_pair(cluster: Cluster, first: int, second: int) -> tuple[float, float]:
    """Bytes per second and seconds of a hop between two devices, when all devices send at once.

    Raises `InputError` for a rank that the cluster does not have.
    """
    world = cluster.world_size
    for rank in (first, second):
        if not 0 <= rank < world:
            raise InputError(f"rank {rank}: the cluster has ranks 0 to {world - 1}")
    if first == second:
        raise InputError(f"rank {first} twice: a pair has two devices")
    for tier in tiers(cluster):
        if first // tier.reach == second // tier.reach:
            return tier.bandwidth / max(tier.wires, 1), tier.latency
    raise AssertionError("the last tier reaches all ranks")


def describe(cluster: Cluster) -> str:
    """The network in one line: each tier, its devices, and a device's bandwidth on it."""
    parts = []
    for tier in tiers(cluster):
        wired = " in a mesh" if tier.wires else ""
        parts.append(f"{tier.name} {tier.bandwidth / 1e9:.4g} GB/s a device{wired}, joins {tier.reach}")
    if cluster.measured:
        parts.append(f"bandwidth from {len(cluster.measured)} measured collectives")
    return "; ".join(parts)


def graph(cluster: Cluster) -> networkx.Graph[Any]:
    """The cluster as a graph of devices, switches and links, for a reader or another program.

    Nodes are tuples of a kind and numbers: `("device", rank)`, `("island", i)`, `("host", node)`, `("nic",
    node, j)`, `("leaf", pod, rail)`, `("pod", pod)` and `("spine",)`. Edges have `bandwidth` in bytes per
    second and direction, and `latency` in seconds, half a hop at each device. A device uses the network cards
    nearest to its place in the node; its edges have its shares of the cards.

    Raises `InputError` for more than `GRAPH_LIMIT` devices.
    """
    import networkx  # It takes a quarter of a second to load.

    world = cluster.world_size
    if world > GRAPH_LIMIT:
        raise InputError(f"world size {world}: a graph is made of up to {GRAPH_LIMIT} devices")
    result: networkx.Graph[Any] = networkx.Graph()
    inside = [tier for tier in tiers(cluster) if not tier.between_nodes]
    for tier in inside:
        kind = "host" if tier is not inside[0] else "island"
        for rank in range(world):
            block = rank // tier.reach
            half = {"latency": tier.latency / 2, "tier": tier.name}
            if not tier.wires:
                result.add_edge(("device", rank), (kind, block), bandwidth=tier.bandwidth, **half)
                continue
            for other in range(rank + 1, min((block + 1) * tier.reach, world)):
                wire = {"bandwidth": tier.bandwidth / tier.wires, "latency": tier.latency}
                result.add_edge(("device", rank), ("device", other), tier=tier.name, **wire)
    if any(tier.between_nodes for tier in tiers(cluster)):
        _add_network(result, cluster)
    return result


def _add_network(result: networkx.Graph[Any], cluster: Cluster) -> None:
    """Add network cards, leaf switches of each rail, and the spine."""
    local, slow = cluster.devices_per_node, cluster.slow_link
    device = cluster.device
    usual = (device.nics_per_node or device.devices_per_node) * local // device.devices_per_node
    cards = cluster.nics_per_node or max(usual, 1)
    card = slow.bandwidth * local / cards
    pods = max(pod_ranks(cluster) // local, 1)
    for node in range(cluster.nodes):
        pod = node // pods
        for place in range(local):
            # In units of a device's share of a card: device `place` owns [place, place + 1) * cards.
            start, end = place * cards, (place + 1) * cards
            for nic in range(start // local, -(-end // local)):
                part = min(end, (nic + 1) * local) - max(start, nic * local)
                wire = {"bandwidth": card * part / local, "latency": slow.latency / 2, "tier": slow.name}
                result.add_edge(("device", node * local + place), ("nic", node, nic), **wire)
        for nic in range(cards):
            wire = {"bandwidth": card, "latency": 0.0, "tier": slow.name}
            result.add_edge(("nic", node, nic), ("leaf", pod, nic), **wire)
    for pod in range(-(-cluster.nodes // pods)):
        joined = min(pods, cluster.nodes - pod * pods)
        for nic in range(cards):
            wire = {"bandwidth": card * joined, "latency": 0.0, "tier": slow.name}
            result.add_edge(("leaf", pod, nic), ("pod", pod), **wire)
        up = card * cards * joined / cluster.oversubscription
        result.add_edge(("pod", pod), ("spine",), bandwidth=up, latency=0.0, tier=f"{slow.name} spine")
