"""One cluster of nodes of two kinds, and the device and the links that stand for both."""

from __future__ import annotations

import math

from costmodels.spec.hardware import Cluster, Device, Link


def mixed_cluster(first: Cluster, second: Cluster) -> Cluster:
    """The cluster of nodes of two kinds, with the ranks of `first` in front.

    Its device represents both kinds: it has the mean of their peaks, the larger memory (`StageMemory.absent`
    is the difference), and otherwise the lesser of each figure. Its links are the slower ones of each tier.

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
