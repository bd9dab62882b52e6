"""Seconds of collectives on the tiers of the network that a group really spans.

Ranks are placed in the order tp, cp, dp, pp (`Layout`), so a group is `size` ranks that lie `stride`
apart. Costs are alpha-beta (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005): every rank sends
(size - 1)/size of the payload once in an all-gather or a reduce-scatter, twice in an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodels.hardware import Cluster
from costmodels.table import Floats, Ints


@dataclass(frozen=True)
class Group:
    """A process group of each row; arrays of shape [n]."""

    size: Ints
    local: Ints
    """Its ranks in one node."""
    bandwidth: Floats
    """Bytes per second that one rank passes on in a ring through all ranks."""
    latency: Floats
    """Seconds of one all-gather of nothing."""
    intra_bandwidth: float
    inter_bandwidth: float


def group(
    cluster: Cluster, efficiency: float, size: Ints, stride: Ints | npt.NDArray[np.int64] | int
) -> Group:
    """The groups of `size` ranks that lie `stride` apart.

    A group whose blocks do not divide a node has members that straddle two nodes; the slowest counts.
    The ranks that a group has in a node drive a ring each, through their own share of the node's
    network cards; groups that lie between them use the shares of the other ranks. Latency grows with
    the logarithm of the ranks in a node and linearly with the nodes, as NCCL's rings do.
    """
    device, per_node = cluster.device, cluster.devices_per_node
    stride = np.asarray(stride)
    extent = size * stride
    inside = (per_node % extent == 0) | (cluster.world_size <= per_node)
    straddling = ~inside & (extent <= per_node)
    local = np.where(inside, size, np.where(straddling, 1, np.maximum(per_node // stride, 1)))
    nodes = -(-size // local)
    intra = device.intra_node.bandwidth * efficiency
    inter = device.inter_node.bandwidth * efficiency
    within = np.where(local > 1, intra, np.inf)
    across = np.where(nodes > 1, inter * local, np.inf)
    bandwidth = np.where(size > 1, np.minimum(within, across), intra)
    latency = np.log2(local) * device.intra_node.latency + (nodes - 1) * device.inter_node.latency
    return Group(size, local, bandwidth, latency, intra, inter)


def all_gather(members: Group, payload: Floats, calls: Floats | float = 1.0) -> Floats:
    """Seconds to gather `payload` bytes (the whole, on every rank) in `calls` calls."""
    share = (members.size - 1) / members.size
    result: Floats = payload * share / members.bandwidth + calls * members.latency
    return result


def reduce_scatter(members: Group, payload: Floats, calls: Floats | float = 1.0) -> Floats:
    """Seconds to sum `payload` bytes of every rank, a part on each: an all-gather in reverse."""
    return all_gather(members, payload, calls)


def all_reduce(members: Group, payload: Floats, calls: Floats | float = 1.0) -> Floats:
    """Seconds to sum `payload` bytes on every rank: reduce-scatter, then all-gather."""
    return 2.0 * all_gather(members, payload, calls)


def all_to_all(members: Group, payload: Floats) -> Floats:
    """Seconds for every rank to send `payload` bytes, an equal part to each rank of the group.

    Parts for the own node and for other nodes travel at the same time, each on its tier.
    """
    inside = payload * (members.local - 1) / members.size / members.intra_bandwidth
    outside = payload * (members.size - members.local) / members.size / members.inter_bandwidth
    result: Floats = np.maximum(inside, outside) + members.latency
    return result


def send(cluster: Cluster, efficiency: float, payload: Floats, size: Ints, stride: Ints) -> Floats:
    """Seconds of one message between neighbours of a group; the slowest pair counts."""
    device = cluster.device
    inside = (cluster.devices_per_node % (size * stride) == 0) | (
        cluster.world_size <= cluster.devices_per_node
    )
    within = payload / (device.intra_node.bandwidth * efficiency) + device.intra_node.latency
    across = payload / (device.inter_node.bandwidth * efficiency) + device.inter_node.latency
    return np.where(size > 1, np.where(inside, within, across), 0.0)
