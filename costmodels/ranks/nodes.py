"""Clusters of nodes of two kinds: which kind runs each pipeline rank, and what stands for both.

Ranks of the first kind come first, and pipeline ranks are the outermost degree of a layout, so that a run of
stages in front is on the first kind and the rest on the second. Groups of a stage (tp, cp, ep, dp) then have
devices and links of one kind. A stage that has ranks of both, such as that of a layout without a pipeline,
waits in every collective for its slower ranks, and the links between them are the slower ones of both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.memory.states import memory_policy
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Device, Link
from costmodels.spec.layout import V_SCHEDULES
from costmodels.spec.table import SCHEDULES, Floats, Ints, LayoutTable

BOTH = 2
"""Kind of a stage that has ranks of both kinds; 0 and 1 are the kinds."""


@dataclass(frozen=True)
class Site:
    """Where a stage may be: devices of one kind, and the links between them."""

    cluster: Cluster
    """Of one kind."""
    engine: Engine
    """With its constants for the device."""
    absent: float
    """Bytes that one of its devices has less than one of the kind with most memory."""


def sites(cluster: Cluster, engine: Engine) -> tuple[Site, ...]:
    """The first kind, the second kind, and the devices of each on the links that join both.

    Args:
        cluster: of two kinds.
        engine: with its constants for all devices, as the catalogue has it.
    """
    apart = [
        _followed(cluster, part, ranks)
        for part, ranks in zip(cluster.parts, ranks_of_kinds(cluster), strict=True)
    ]
    joined = [
        cluster.model_copy(update={"device": part.device, "memory_bytes": part.memory_bytes, "parts": ()})
        for part in cluster.parts
    ]
    most = max(part.memory_bytes for part in cluster.parts)
    own = [engine.for_device(part.device) for part in cluster.parts]
    return tuple(
        Site(one, constants, most - one.memory_bytes)
        for one, constants in zip((*apart, *joined), (*own, *own), strict=True)
    )


def _followed(cluster: Cluster, part: Cluster, ranks: int) -> Cluster:
    """A kind of node with its share of ranks, and links as much faster as those of the whole are made."""
    fast, slow = (
        whole.bandwidth / min(getattr(one, name).bandwidth for one in cluster.parts)
        for name, whole in (("fast_link", cluster.fast_link), ("slow_link", cluster.slow_link))
    )
    changed: dict[str, object] = {"world_size": ranks}
    if fast != 1.0:
        changed["intra_node"] = _times(part.fast_link, fast)
    if slow != 1.0:
        changed |= {"inter_node": _times(part.slow_link, slow), "nics_per_node": None}
    return part.model_copy(update=changed)


def _times(link: Link, times: float) -> Link:
    return link.model_copy(update={"bandwidth": link.bandwidth * times})


def ranks_of_kinds(cluster: Cluster) -> tuple[int, int]:
    """Ranks of each kind; of a cluster whose world size was changed, in the proportion of its parts."""
    first, second = (part.world_size for part in cluster.parts)
    border = cluster.world_size * first // (first + second)
    return border, cluster.world_size - border


def mixed(first: Cluster, second: Cluster) -> Cluster:
    """The cluster of the nodes of two kinds, the ranks of `first` in front.

    Its device stands for both: the mean of their peaks, the larger memory (`StageMemory.absent` is what the
    other has less), and otherwise the lesser of each figure. Its links are the slower ones of each tier.

    Raises:
        ValueError: the devices share no number format.
    """
    parts = first, second
    local = math.gcd(first.devices_per_node, second.devices_per_node)
    memory = max(part.memory_bytes for part in parts)
    pods = [part.nodes_per_pod * part.devices_per_node for part in parts if part.nodes_per_pod is not None]
    return Cluster(
        device=_device(first, second, memory),
        world_size=first.world_size + second.world_size,
        devices_per_node=local,
        memory_bytes=memory,
        memory_margin_bytes=first.memory_margin_bytes,
        intra_node=_slower(first.fast_link, second.fast_link),
        inter_node=_slower(first.slow_link, second.slow_link),
        island=math.gcd(first.joined, second.joined, local),
        nodes_per_pod=min(pods) // local if pods else None,
        oversubscription=max(part.oversubscription for part in parts),
        parts=parts,
    )


def _slower(one: Link, other: Link) -> Link:
    slower, faster = (one, other) if one.bandwidth <= other.bandwidth else (other, one)
    latency = max(slower.latency, faster.latency)
    wiring = "mesh" if "mesh" in (one.wiring, other.wiring) else "switch"
    return slower.model_copy(update={"latency": latency, "wiring": wiring})


def _device(first: Cluster, second: Cluster, memory: float) -> Device:
    one, other = first.device, second.device
    total = first.world_size + second.world_size
    peaks = {
        name: (peak * first.world_size + other.peak_flops[name] * second.world_size) / total
        for name, peak in one.peak_flops.items()
        if name in other.peak_flops
    }
    if not peaks:
        raise ValueError(f"{one.name} and {other.name} share no number format to train in")
    least = (
        *("memory_bandwidth", "host_bandwidth", "host_memory_bandwidth", "host_memory_bytes", "cores"),
        "devices_per_node",
    )
    return Device(
        name=f"{one.name} + {other.name}",
        vendor=one.vendor if one.vendor == other.vendor else f"{one.vendor} + {other.vendor}",
        kind=one.kind,
        peak_flops=peaks,
        memory_bytes=memory,
        context_bytes=max(one.context_bytes, other.context_bytes),
        intra_node=_slower(one.intra_node, other.intra_node),
        inter_node=_slower(one.inter_node, other.inter_node),
        source=f"stands for {first.world_size} x {one.name} and {second.world_size} x {other.name}",
        **{name: min(getattr(one, name), getattr(other, name)) for name in least},
    )


def kinds_of_ranks(cluster: Cluster, pipeline: int) -> Ints:
    """Kind of each pipeline rank, [pp]: 0, 1 or `BOTH`."""
    each = cluster.world_size // pipeline
    start = np.arange(pipeline) * each
    border, _ = ranks_of_kinds(cluster)
    return np.where(start + each <= border, 0, np.where(start >= border, 1, BOTH))


def ranks_of_stages(table: LayoutTable, row: int) -> Ints:
    """Pipeline rank of each stage of one row, [stages]."""
    pipeline, stages = int(table.pipeline_parallel[row]), len(table.splits[int(table.split[row])])
    rank = np.arange(stages) % pipeline
    if SCHEDULES[int(table.schedule[row])] in V_SCHEDULES:
        rank[pipeline:] = rank[pipeline:][::-1].copy()
    return rank


def on_sites(site: Ints, of: Callable[[int], Floats]) -> Floats:
    """Of each entry what `of` says of its site; `of` gives arrays that broadcast to the shape of `site`."""
    result: Floats = np.zeros(site.shape)
    for code in range(BOTH + 2):
        if (here := site == code).any():
            result = np.where(here, of(code), result)
    return result


def slower_site(kind: Ints, of: Callable[[int], Floats]) -> Ints:
    """Site of each entry: its kind, and of stages of both kinds the one of which `of` is largest."""
    if not (kind == BOTH).any():
        return kind
    return np.where((kind == BOTH) & (of(BOTH + 1) > of(BOTH)), BOTH + 1, kind)


def check_precision(cluster: Cluster, engine: Engine, precision: str) -> None:
    """Raise `InputError` where the engine does not train in `precision` on a kind of device."""
    for site in sites(cluster, engine)[:2]:
        memory_policy(site.engine, precision)
