"""More devices, and devices with more memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from costmodels.catalogue import device_names, load_device
from costmodels.spec.hardware import Cluster, Device
from costmodels.spec.record import GIB
from planner.inputs.cluster import MOST_DEVICES
from planner.problem import Problem
from planner.proposals.fits import Budget, first_that_fits, offloads
from planner.proposals.proposal import Changed, Proposal
from planner.space.rule import divisors

MOST_TIMES = 64
"""The largest factor by which the number of devices is increased in a search for one that fits."""


def with_world_size(problem: Problem, world_size: int) -> Problem:
    """The problem on `world_size` devices, with the links of the present devices."""
    cluster = problem.cluster
    # One node that is not full gains devices before a second one is needed.
    local = cluster.devices_per_node
    if cluster.world_size == local:
        full = min(world_size, max(local, cluster.device.devices_per_node))
        local = full if world_size % full == 0 else local
    return replace(
        problem,
        # The links between devices stay as they are.
        cluster=cluster.model_copy(update={"world_size": world_size, "devices_per_node": local}),
    )


def larger_sizes(problem: Problem) -> list[int]:
    """Numbers of devices above that of the question, ascending: divisors of a node, then whole nodes.

    The number of nodes is a power of two, or three times one.
    """
    cluster = problem.cluster
    world, local = cluster.world_size, cluster.devices_per_node
    node = max(local, cluster.device.devices_per_node) if world == local else local
    nodes = [factor << power for factor in (1, 3) for power in range(world.bit_length() + 6)]
    sizes = {*divisors(node), *(count * node for count in nodes), *(world << power for power in range(1, 7))}
    most = min(MOST_TIMES * world, MOST_DEVICES)
    return sorted(size for size in sizes if world < size <= most and (size < node or size % local == 0))


def device_counts(problem: Problem, budget: Budget) -> list[Proposal]:
    """The fewest devices with a plan; if that plan offloads, also the fewest that need no offloading."""
    if problem.cluster.device.kind == "cpu" or problem.cluster.parts:
        return []  # More ranks share the same memory; of two kinds of nodes nobody knows which to add.
    changed = [_on_devices(problem, size) for size in larger_sizes(problem)]
    found = first_that_fits(changed, budget)
    if not found or not offloads(found[0].plan):
        return found
    least = found[0].plan.cluster.world_size
    more = [one for one in changed if one.problem.cluster.world_size > least]
    return found + first_that_fits(more, budget, offload=False)


def _on_devices(problem: Problem, size: int) -> Changed:
    more = with_world_size(problem, size)
    local = more.cluster.devices_per_node
    flags: tuple[str, ...] = ("--world-size", str(size))
    keywords: dict[str, Any] = {"world_size": size}
    if local != problem.cluster.devices_per_node:
        flags += ("--local-world-size", str(local))
        keywords["local_world_size"] = local
    return Changed("devices", f"on {size} of them", flags, keywords, more)


def larger_devices(problem: Problem) -> Iterator[Changed]:
    """Devices of the same kind with more memory: those of the same maker first, small ones first."""
    cluster = problem.cluster
    own = cluster.device
    # A user who gives the memory of a device would have as much on another device.
    if cluster.parts or cluster.memory_bytes != own.memory_bytes or own.kind == "cpu":
        return
    bigger = [
        device
        for device in map(load_device, device_names())
        if device.kind == own.kind
        and device.memory_bytes > own.memory_bytes
        and problem.precision in device.peak_flops
    ]
    bigger.sort(key=lambda device: (device.vendor != own.vendor, device.memory_bytes, device.name))
    for device in bigger:
        local = cluster.devices_per_node
        flags: tuple[str, ...] = ("--device", device.name)
        keywords: dict[str, Any] = {"device": device.name}
        if local != min(cluster.world_size, device.devices_per_node):
            flags += ("--local-world-size", str(local))
            keywords["local_world_size"] = local
        what = f"on {cluster.world_size} x {device.name} ({device.memory_bytes / GIB:.0f} GiB)"
        changed = replace(problem, cluster=_of_device(cluster, device))
        yield Changed("device", what, flags, keywords, changed)


def _of_device(cluster: Cluster, device: Device) -> Cluster:
    """The cluster with other devices, joined by links of their own where nobody said what joins them."""
    values: dict[str, Any] = {"device": device, "memory_bytes": device.memory_bytes}
    if cluster.measured == cluster.device.collectives:
        values["measured"] = device.collectives
    return cluster.model_copy(update=values)
