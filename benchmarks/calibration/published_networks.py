"""The network of a job, read from the notes of its row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from costmodels.spec.hardware import Collective, MeasuredCollective

NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
PRINTED = re.compile(f"AR/AG/RS={NUMBER}/{NUMBER}/{NUMBER}")
"""Pattern of notes with the GB/s of an all-reduce, an all-gather and a reduce-scatter among all devices of
the job."""

CARD = re.compile(rf"\bIB {NUMBER} Gb/s")
"""Pattern of notes with the gigabits per second of a device's network card."""

KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def card_bandwidth(notes: str) -> float | None:
    """Bytes per second of a device's InfiniBand card, if the notes give it (`IB 200 Gb/s`)."""
    said = CARD.search(notes)
    return None if said is None else float(said[1]) * 1e9 / 8


def job_collectives(
    notes: str, known: Mapping[str, Any], world: int, nodes: int
) -> tuple[MeasuredCollective, ...]:
    """The collectives that a job timed on its own devices before training, if the notes give them.

    An all-reduce is printed as bus bandwidth. The others are printed as half of the message over its time,
    which 2 (n - 1) / n turns into bus bandwidth (in one node all three then agree). A message of
    `known["message_bytes"]` takes longer the more nodes there are, at 64 of them seven times as long as at
    one. Training moves ten times as many bytes in less time than this rate would allow. Time beyond
    `known["bus_bandwidth"]` is therefore counted as latency.
    """
    seen = PRINTED.search(notes)
    if seen is None or not all(map(float, seen.groups())) or world == 1:
        return ()
    message, links = float(known["message_bytes"]), float(known["bus_bandwidth"])
    found = []
    for kind, printed in zip(KINDS, seen.groups(), strict=True):
        passes = 2 * (world - 1) / world
        bus = float(printed) * 1e9 * (1 if kind == "all_reduce" else passes)
        latency = 0.0
        if nodes > 1 and bus < links:
            sent = message * passes / (1 if kind == "all_reduce" else 2)
            bus, latency = links, sent / bus - sent / links
        found.append(
            MeasuredCollective(
                collective=kind,
                devices=world,
                nodes=nodes,
                bus_bandwidth=bus,
                message_bytes=message,
                latency=latency,
            )
        )
    return tuple(found)


def node_collectives(bus_bandwidth: Mapping[int, float]) -> tuple[MeasuredCollective, ...]:
    """All-reduces in one node that a source measured, from bytes per second by ranks."""
    return tuple(
        MeasuredCollective(collective="all_reduce", devices=ranks, nodes=1, bus_bandwidth=rate)
        for ranks, rate in bus_bandwidth.items()
    )


def cluster_state(notes: str, known: Mapping[str, Any], nodes: int) -> Mapping[str, Any]:
    """Constants of the engine for the state of a job's cluster.

    The state is recognised by the seconds of the job's all-gather: more than `first` on one node, and `more`
    for each further node. The last of the matching `states` is used.
    """
    seen = PRINTED.search(notes)
    changes: Mapping[str, Any] = {}
    if seen is None or not float(seen[2]):
        return changes
    seconds = float(known["message_bytes"]) / (2e9 * float(seen[2]))
    for each in known["states"]:
        if nodes <= each.get("nodes", nodes) and seconds > each["first"] + each["more"] * (nodes - 1):
            changes = each["switches"]
    return changes
