"""The speed of devices and links: a GEMM on each rank, and collectives of groups of ranks.

The whole measurement takes seconds for any number of ranks. Messages grow only until a call takes long, and
links between pairs of nodes are measured at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from costmodels.spec.hardware import Collective
from runtime.parallel.accelerator import is_accelerator, kind_of, synchronize

GEMM_SIZE = {"cpu": 384, "accelerator": 8192}
GEMM_CALLS = 8

FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 16, {"cpu": 1 << 22, "accelerator": 1 << 28}, 8
"""Bytes of the smallest and of the largest message, and the factor between consecutive sizes."""

LONG_S = 0.1
"""Seconds of a call after which no larger message is tried."""

CALLS = 4
"""Number of calls of each size; the shortest counts, as other processes may disturb the hosts."""

SLOW_DEVICE = {"cpu": 0.5, "accelerator": 0.85}
"""Share of the median rate below which a device is reported; CPUs are shared and vary."""

SLOW_LINK = 0.5
"""Share of the median rate below which a link between two nodes is reported."""


@dataclass(frozen=True)
class GroupRate:
    """Bus bandwidth of one collective over one group of ranks, by nccl-tests' definition."""

    collective: Collective
    devices: int
    nodes: int
    bytes_per_s: float
    message_bytes: int


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second of a message from one node to the next."""

    sender: int
    receiver: int
    bytes_per_s: float


def gemm_rate(device: torch.device) -> float:
    """FLOP per second of a square GEMM on this rank."""
    size = GEMM_SIZE[kind_of(device)]
    dtype = torch.bfloat16 if is_accelerator(device) else torch.float32
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(GEMM_CALLS):
        best = min(best, seconds_of(lambda: left @ left, device))
    return 2.0 * size**3 / best


def group_rates(rank: int, local_ranks: int, world_size: int, device: torch.device) -> Iterator[GroupRate]:
    """Rates of this rank's groups: its node, one rank of each node, and all ranks; every rank calls it.

    Ranks fill nodes in order, with the same number on each node.
    """
    nodes = world_size // local_ranks
    node, place = divmod(rank, local_ranks)
    if local_ranks > 1:
        members = range(node * local_ranks, (node + 1) * local_ranks)
        yield from _sweep(members, 1, rank, device)
    if nodes > 1:
        if local_ranks > 1:
            # Ranks of other places on the nodes would share the network with this group.
            across = range(0, world_size, local_ranks)
            group = dist.new_group(list(across))
            if place == 0:
                yield from _sweep(across, nodes, rank, device, group)
            dist.barrier()
        yield from _sweep(range(world_size), nodes, rank, device)


def link_rates(rank: int, local_ranks: int, world_size: int, device: torch.device) -> list[LinkRate]:
    """The links from each node to the next one that start at this rank; every rank calls it."""
    nodes = world_size // local_ranks
    node, place = divmod(rank, local_ranks)
    found: list[LinkRate] = []
    if nodes < 2:
        return found
    # Neighbours in two turns, so that no node has two partners at a time; then the last to the first, which
    # of two nodes is the other direction of the same link.
    turns = [[(at, at + 1) for at in range(first, nodes - 1, 2)] for first in (0, 1)]
    turns.append([(nodes - 1, 0)])
    for turn in turns:
        for sender, receiver in turn:
            if place == 0 and node in (sender, receiver):
                other = receiver if node == sender else sender
                rate = _link(node == sender, other * local_ranks, device)
                if node == sender:
                    found.append(LinkRate(sender, receiver, rate))
        dist.barrier()
    return found


def _link(sends: bool, other: int, device: torch.device) -> float:
    """Bytes per second of messages to or from another rank; both have the same number of them."""
    size = FIRST_BYTES
    rate = 0.0
    answer = torch.zeros(1, device=device)
    while True:
        message = torch.zeros(size, dtype=torch.uint8, device=device)

        def pass_on(message: torch.Tensor = message) -> None:
            if sends:
                dist.send(message, other)
                dist.recv(answer, other)
            else:
                dist.recv(message, other)
                dist.send(answer, other)

        pass_on()
        seconds = torch.tensor([seconds_of(pass_on, device)], device=device)
        # The sender decides for both.
        if sends:
            dist.send(seconds, other)
        else:
            dist.recv(seconds, other)
        rate = size / float(seconds)
        if float(seconds) > LONG_S or size * GROWTH > MOST_BYTES[kind_of(device)]:
            return rate
        size *= GROWTH


def _sweep(
    members: Sequence[int], nodes: int, rank: int, device: torch.device, group: Any = None
) -> Iterator[GroupRate]:
    """Rates of every collective over a group, at its largest message."""
    if group is None and len(members) < dist.get_world_size():
        group = dist.new_group(list(members), use_local_synchronization=True)
    count = len(members)
    for name in ("all_reduce", "all_gather", "all_to_all"):
        yield _rate(name, count, nodes, device, group)  # type: ignore[arg-type]


def _rate(name: Collective, count: int, nodes: int, device: torch.device, group: Any) -> GroupRate:
    size = FIRST_BYTES
    while True:
        call, factor = collective_call(name, size, count, device, group)
        call()
        seconds = min(seconds_of(call, device) for _ in range(CALLS))
        slowest = torch.tensor(seconds, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if float(slowest) > LONG_S or size * GROWTH > MOST_BYTES[kind_of(device)]:
            return GroupRate(name, count, nodes, factor * size / float(slowest), size)
        size *= GROWTH


def collective_call(
    name: Collective, size: int, count: int, device: torch.device, group: Any
) -> tuple[Callable[[], Any], float]:
    """A call that moves `size` bytes, and its bus bytes (nccl-tests, PERFORMANCE.md)."""
    elements = max(1, size // 4 // count) * count
    whole = torch.zeros(elements, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group), 2 * (count - 1) / count
    if name == "all_gather":
        part = torch.zeros(elements // count, device=device)
        parts = list(whole.chunk(count))
        return lambda: dist.all_gather(parts, part, group=group), (count - 1) / count
    if name == "reduce_scatter":
        part = torch.zeros(elements // count, device=device)
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group), (count - 1) / count
    other = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(other, whole, group=group), (count - 1) / count


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call until the device has finished it."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return max(time.perf_counter() - started, 1e-9)


def slow_devices(
    rates: Sequence[float], names: Sequence[str], kind: Literal["cpu", "accelerator"]
) -> Iterator[str]:
    """Lines that name the ranks whose device is slower than most."""
    usual = statistics.median(rates)
    for rate, name in zip(rates, names, strict=True):
        if rate < SLOW_DEVICE[kind] * usual:
            yield f"slow device: {name} multiplies at {rate / 1e12:.3g} TFLOP/s, {usual / 1e12:.3g} usually"


def slow_nodes(rates: Sequence[Sequence[GroupRate]], local_ranks: int, hosts: Sequence[str]) -> Iterator[str]:
    """Lines that name nodes with slower communication among their ranks than most nodes.

    Args:
        rates: measurements of each rank, in order.
        hosts: host of each node.
    """
    by_call: dict[Collective, list[float]] = {}
    for first in range(0, len(rates), local_ranks):
        for rate in rates[first]:
            if rate.nodes == 1:
                by_call.setdefault(rate.collective, []).append(rate.bytes_per_s)
    for name, of_nodes in by_call.items():
        usual = statistics.median(of_nodes)
        for host, bytes_per_s in zip(hosts, of_nodes, strict=True):
            if bytes_per_s < SLOW_LINK * usual:
                yield (
                    f"slow node: {name} among the ranks on {host} runs at {bytes_per_s / 1e9:.3g} GB/s, "
                    f"{usual / 1e9:.3g} usually"
                )


def slow_links(links: Sequence[LinkRate], hosts: Sequence[str]) -> Iterator[str]:
    """Lines that name slower links between nodes than most.

    Args:
        hosts: host of each node.
    """
    if len(links) < 2:
        return
    usual = statistics.median(link.bytes_per_s for link in links)
    for link in links:
        if link.bytes_per_s < SLOW_LINK * usual:
            yield (
                f"slow link: {hosts[link.sender]} to {hosts[link.receiver]} carries "
                f"{link.bytes_per_s / 1e9:.3g} GB/s, {usual / 1e9:.3g} usually"
            )


def table_rows(rates: Sequence[GroupRate], links: Sequence[LinkRate], local_ranks: int) -> list[str]:
    """Rows of a network table (`--network-table`) from the measurements.

    Among groups of the same size, and among links, the slowest counts, as a job waits for it.
    """
    slowest: dict[tuple[str, int, int], GroupRate] = {}
    for rate in rates:
        key = (rate.collective, rate.devices, rate.nodes)
        if key not in slowest or rate.bytes_per_s < slowest[key].bytes_per_s:
            slowest[key] = rate
    lines = ["collective,devices,nodes,busbw_gbs,bytes"]
    for rate in slowest.values():
        lines.append(
            f"{rate.collective},{rate.devices},{rate.nodes},{rate.bytes_per_s / 1e9:.6g},{rate.message_bytes}"
        )
    if links:
        least = min(link.bytes_per_s for link in links)
        lines.append(f"send,2,2,{least / 1e9:.6g},{FIRST_BYTES}")
    return lines
