"""Seconds of collectives by size and group; all groups of a size run at the same time, as in training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from costmodels.calibration.machine_measurements import CallTime
from costmodels.spec.hardware import Collective
from runtime.calibrate.kernels import call_seconds
from runtime.parallel.accelerator import kind_of
from runtime.parallel.cores import keep_to_own_cores
from runtime.parallel.ranks import Ranks
from runtime.preflight.speed import LONG_S, collective_call

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

SIZES = {"cpu": (1 << 12, 1 << 17, 1 << 21), "accelerator": (1 << 14, 1 << 20, 1 << 24, 1 << 28)}
"""Bytes of the messages."""

ROUNDS = 5
"""Number of round trips that are timed together."""


def measure_calls(ranks: Ranks, device: torch.device, budget_s: float) -> Iterator[CallTime]:
    """Calls of each collective over groups of neighbours and over all ranks; every rank calls it.

    Args:
        budget_s: seconds after which no further group is measured; the first group always is.
    """
    started = time.perf_counter()
    groups = [(count, *_own_group(ranks, count, stride)) for count, stride in _groups(ranks)]
    keep_to_own_cores(device)  # As the steps of a run do, once all groups are there.
    for number, (count, group, members) in enumerate(groups):
        # The first rank's clock decides for all.
        late = torch.tensor(float(time.perf_counter() - started > budget_s), device=device)
        dist.broadcast(late, 0)
        if number and float(late):
            return
        nodes = len({member // ranks.local_world_size for member in members})
        for name in COLLECTIVES:
            for size in SIZES[kind_of(device)]:
                call, _ = collective_call(name, size, count, device, group)
                seconds = call_seconds(call, device)
                yield CallTime(
                    collective=name, devices=count, nodes=nodes, message_bytes=size, seconds=seconds
                )
                if seconds > LONG_S:
                    break
        if count == 2:
            yield from _messages(ranks, members, nodes, device)


def _groups(ranks: Ranks) -> Iterator[tuple[int, int]]:
    """Sizes and strides of groups: neighbours of a node, one rank of each node, and all."""
    local, world = ranks.local_world_size, ranks.world_size
    size = 2
    while size <= local:
        yield size, 1
        size *= 2
    if world > local:
        if local > 1:
            yield world // local, local
        yield world, 1


def _own_group(ranks: Ranks, count: int, stride: int) -> tuple[Any, list[int]]:
    """This rank's group, among groups that tile all ranks, and its members."""
    base = ranks.rank // (count * stride) * count * stride + ranks.rank % stride
    own = [base + stride * number for number in range(count)]
    if count == ranks.world_size:
        return None, own
    return dist.new_group(own, use_local_synchronization=True), own


def _messages(ranks: Ranks, members: list[int], nodes: int, device: torch.device) -> Iterator[CallTime]:
    """Round trips of messages between pairs of neighbours."""
    first, second = members
    for size in SIZES[kind_of(device)]:
        message = torch.zeros(size, dtype=torch.uint8, device=device)

        def pass_on(message: torch.Tensor = message) -> None:
            for _ in range(ROUNDS):
                for sender, receiver in ((first, second), (second, first)):
                    if ranks.rank == sender:
                        dist.send(message, receiver)
                    else:
                        dist.recv(message, sender)

        seconds = call_seconds(pass_on, device) / (2 * ROUNDS)
        yield CallTime(collective="send", devices=2, nodes=nodes, message_bytes=size, seconds=seconds)
