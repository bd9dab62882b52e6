"""Nodes of two kinds: how a user writes them, and what each does in a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodels.catalogue import load_device
from costmodels.errors import InputError
from costmodels.pipeline_times import rank_seconds
from costmodels.ranks.sites import BOTH, kinds_of_ranks
from costmodels.spec.hardware import Cluster, Device
from costmodels.spec.layout import Layout

if TYPE_CHECKING:
    from planner.plan import Plan

KINDS = "a100-80g:4,v100-32g:4"
"""How nodes of two kinds are written: a device and its number of nodes, twice."""


def is_of_kinds(device: Device | str | None) -> bool:
    """Whether a device is written as nodes of several kinds."""
    return isinstance(device, str) and "," in device


def parse_kinds(text: str) -> list[tuple[Device, int]]:
    """The devices of `a100-80g:4,v100-32g:4`, and how many nodes there are of each.

    Raises:
        InputError: not two kinds with their nodes, or kinds that cannot train together.
    """
    items = [item.strip() for item in text.split(",")]
    if len(items) != 2:
        raise InputError(f"device {text}: {len(items)} kinds; expected nodes of two kinds, such as {KINDS}")
    found = []
    for item in items:
        name, colon, count = item.rpartition(":")
        if not colon or not (count.isascii() and count.isdigit()) or not 0 < int(count[:9]) == int(count):
            raise InputError(
                f"device {text}: {item!r} has no number of nodes; expected two kinds with their nodes, such "
                f"as {KINDS}"
            )
        found.append((load_device(name), int(count)))
    (one, _), (other, _) = found
    for device in (one, other):
        if device.kind == "cpu":
            raise InputError(f"device {text}: cpu is one rank's share of this machine, not a kind of node")
    if (one.vendor, one.kind) != (other.vendor, other.kind):
        raise InputError(
            f"device {text}: {one.name} is of {one.vendor} and {other.name} of {other.vendor}, whose "
            "communication libraries do not talk to each other; plan for each alone"
        )
    if not one.peak_flops.keys() & other.peak_flops.keys():
        raise InputError(f"device {text}: {one.name} and {other.name} share no number format to train in")
    return found


def kinds_of_layout(cluster: Cluster, layout: Layout) -> list[tuple[str, list[int]]]:
    """Devices by name and the pipeline ranks of each, in order; both names for a rank on both kinds."""
    ranks = range(layout.pipeline_parallel)
    if not cluster.parts:
        return [(cluster.device.name, list(ranks))]
    kinds = kinds_of_ranks(cluster, layout.pipeline_parallel).tolist()
    names = {BOTH: cluster.device.name, **{code: part.device.name for code, part in enumerate(cluster.parts)}}
    return [(names[kind], [rank for rank in ranks if kinds[rank] == kind]) for kind in dict.fromkeys(kinds)]


def idle_shares(plan: Plan) -> list[float]:
    """Share of the step that each pipeline rank waits for messages and for slower ranks, 0 to 1."""
    layout, estimate = plan.layout, plan.estimate
    busy = layout.micro_batches * rank_seconds(plan.model, plan.cluster, plan.engine, layout)
    waits = estimate.time.bubble + estimate.time.pipeline_parallel + busy.max() - busy
    return [float(share) for share in waits / estimate.step_time_s]
