"""A cluster from callers' inputs: a device, or nodes of two kinds, and their links."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError
from costmodels.network.network_table import read_network_table
from costmodels.spec.hardware import Cluster, Device, Link, MeasuredCollective
from costmodels.spec.mixed_cluster import mixed_cluster
from costmodels.spec.record import GIB
from planner.inputs.device import is_cpu, resolve_device
from planner.inputs.node_kinds import is_of_kinds, parse_kinds
from planner.inputs.numbers import whole_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_DEVICE = "a100-80g"
"""Device that is assumed when none is named."""


MEMORY_VARIABLE = "DEVICE_MEMORY_GB"
"""Environment variable that overrides the memory of one device.

Cards are sold by GB and hold GiB (an "80 GB" A100 has 80 GiB of HBM), so the number counts GiB.
"""

MOST_OVERSUBSCRIPTION = 1e3
"""Largest oversubscription; far above real networks, and far below overflow of sums of seconds."""

LEAST_GBPS, MOST_GBPS = 0.1, 1e5
"""Bounds of the gigabits per second of a link: a tenth of an office network, and ten times NVLink 5."""


MOST_DEVICES = 2**20
"""Most devices; above any real cluster, and listing layouts of more devices takes minutes."""


class NetworkKeywords(TypedDict, total=False):
    """Keywords for links between devices that differ from the catalogue."""

    intra_node_gbps: float | None
    """Gigabits (10^9 bits, an eighth of gigabytes) per second and direction of one device's fast link."""
    inter_node_gbps: float | None
    """Gigabits per second between nodes: of one network card if `nics_per_node` is given, otherwise of one
    device's share of the cards."""
    island: int | None
    """Devices of one fast-link domain, such as NVLink."""
    nics_per_node: int | None
    """Network cards of a node."""
    nodes_per_pod: int | None
    """Nodes under the same leaf switches."""
    oversubscription: float | None
    """Bandwidth of a pod's network cards over that of its links to the spine, such as 2 for 2:1."""
    network_table: str | Path | tuple[MeasuredCollective, ...] | None
    """Measured collectives, or the CSV file that holds them (`read_network_table`)."""


class ClusterKeywords(NetworkKeywords, total=False):
    """Keywords for the memory and the links of a cluster that differ from the catalogue."""

    device_memory_gib: float | None
    """GiB of a device, instead of the memory in the catalogue."""
    memory_margin_gib: float | None
    """GiB to set aside on each device, instead of the estimated driver context, communicators and memory that
    the allocator cannot use (0 for tensors alone)."""


def resolve_cluster(
    device: Device | str | None,
    world_size: int,
    local_world_size: int | None = None,
    **keywords: Unpack[ClusterKeywords],
) -> Cluster:
    """The cluster of `world_size` devices, `local_world_size` in each node.

    If `local_world_size` is not given, a node is the device's usual server. Memory is the device's own,
    unless `device_memory_gib` or the environment's `DEVICE_MEMORY_GB` replaces it. The memory set aside
    beside tensors follows from device and engine, unless `memory_margin_gib` gives it. Links are the device's
    own where `NetworkKeywords` do not replace them. `a100-80g:4,v100-32g:4` are nodes of two kinds with
    `world_size` devices together.
    """
    world_size = whole_number("world_size", world_size, MOST_DEVICES)
    if local_world_size is not None:
        local_world_size = whole_number("local_world_size", local_world_size, MOST_DEVICES)
    wanted = DEFAULT_DEVICE if device is None else device
    if isinstance(wanted, str) and is_of_kinds(wanted):
        return _of_kinds(wanted, world_size, local_world_size, keywords)
    if isinstance(wanted, str):
        # One rank's share of a CPU depends on how many ranks share it.
        if is_cpu(wanted):
            local_world_size = local_world_size or world_size
        resolved = resolve_device(wanted, local_world_size or world_size)
    else:
        resolved = wanted
    memory = _memory_gib(keywords.get("device_memory_gib"))
    values = {
        "device": resolved,
        "world_size": world_size,
        "devices_per_node": local_world_size or min(world_size, resolved.devices_per_node),
        "memory_bytes": resolved.memory_bytes if memory is None else memory * GIB,
        "memory_margin_bytes": _margin_bytes(keywords.get("memory_margin_gib")),
    }
    cluster = build(Cluster, values | _network(resolved, keywords), "cluster")
    given = cluster.intra_node or cluster.inter_node or cluster.nics_per_node
    fast, slow = cluster.fast_link, cluster.slow_link
    if given and cluster.nodes > 1 and slow.bandwidth > fast.bandwidth:
        raise InputError(
            f"{fast.bandwidth * 8 / 1e9:g} gigabits per second of a device inside a node and "
            f"{slow.bandwidth * 8 / 1e9:g} between nodes: expected no less inside; both intra_node_gbps and "
            "inter_node_gbps count gigabits (8 x GB/s), the latter of one card with nics_per_node"
        )
    return cluster


ONE_KIND = ("intra_node_gbps", "island", "network_table")
"""Network keywords that only work for nodes of one kind."""


def _of_kinds(text: str, world_size: int, local_world_size: int | None, keywords: ClusterKeywords) -> Cluster:
    """The cluster of nodes of two kinds, in the given order."""
    given = keywords.get("device_memory_gib")
    if _memory_gib(given) is not None:
        name = MEMORY_VARIABLE if given is None else "device_memory_gib"
        raise InputError(f"{name} with device {text}: each kind has its own; use YAML files of devices")
    for option in ONE_KIND:
        if keywords.get(option) is not None:
            raise InputError(f"{option} with device {text}: each kind has its own; use YAML files of devices")
    kinds = parse_kinds(text)
    sizes = [count * (local_world_size or device.devices_per_node) for device, count in kinds]
    if sum(sizes) != world_size:
        raise InputError(
            f"world_size {world_size}: device {text} has {sizes[0]} + {sizes[1]} = {sum(sizes)} devices"
        )
    first, second = (
        resolve_cluster(device, size, local_world_size, **keywords)
        for (device, _), size in zip(kinds, sizes, strict=True)
    )
    return mixed_cluster(first, second)


def world_size_of_kinds(device: str, local_world_size: int | None = None) -> int:
    """The number of devices of nodes of two kinds, from their numbers of nodes."""
    return sum(count * (local_world_size or kind.devices_per_node) for kind, count in parse_kinds(device))


def _network(device: Device, network: NetworkKeywords) -> dict[str, object]:
    """The fields of `Cluster` that describe the links."""
    counts = {
        "island": network.get("island"),
        "nics_per_node": network.get("nics_per_node"),
        "nodes_per_pod": network.get("nodes_per_pod"),
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{name} {count}: expected a whole number of at least 1")
    values: dict[str, object] = dict(counts)
    for name, gbps, own in (
        ("intra_node", network.get("intra_node_gbps"), device.intra_node),
        ("inter_node", network.get("inter_node_gbps"), device.inter_node),
    ):
        if gbps is not None:
            values[name] = _link(f"{name}_gbps", gbps, own)
    oversubscription = network.get("oversubscription")
    if oversubscription is not None:
        if not 1 <= oversubscription <= MOST_OVERSUBSCRIPTION:
            raise InputError(
                f"oversubscription {oversubscription:g}: expected a number of at least 1, such as 2 for 2:1, "
                f"and at most {MOST_OVERSUBSCRIPTION:g}"
            )
        values["oversubscription"] = oversubscription
    table = network.get("network_table")
    if table is not None:
        values["measured"] = table if isinstance(table, tuple) else read_network_table(table)
    elif not any(name in values for name in ("intra_node", "inter_node")):
        values["measured"] = device.collectives
    return values


def _link(name: str, gbps: float, own: Link) -> Link:
    """`own` with another bandwidth, given in gigabits per second."""
    if not LEAST_GBPS <= gbps <= MOST_GBPS:
        raise InputError(
            f"{name} {gbps:g}: expected gigabits per second (8 x GB/s) from {LEAST_GBPS:g} to {MOST_GBPS:g}; "
            f"{own.name} has {own.bandwidth * 8 / 1e9:g}"
        )
    return own.model_copy(update={"bandwidth": gbps * 1e9 / 8})


def _memory_gib(given: float | None) -> float | None:
    source, value = "device_memory_gib", given
    text = os.environ.get(MEMORY_VARIABLE, "").strip()
    if value is None and text:
        source = MEMORY_VARIABLE
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{source}={text}: expected a number of GiB such as 80") from None
    if value is not None and not 0 < value < 2**30:
        raise InputError(f"{source}={value:g}: expected a number of GiB above 0, such as 80")
    return value


def _margin_bytes(given: float | None) -> float | None:
    if given is not None and not 0 <= given < 2**30:
        raise InputError(f"memory_margin_gib {given:g}: expected a number of GiB of at least 0, such as 2")
    return None if given is None else given * GIB
