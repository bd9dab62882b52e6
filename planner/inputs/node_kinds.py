"""Nodes of two kinds, from callers' inputs."""

from __future__ import annotations

from costmodels.catalogue import load_device
from costmodels.errors import InputError
from costmodels.spec.hardware import Device

KINDS = "a100-80g:4,v100-32g:4"
"""An example of nodes of two kinds: a device and its number of nodes, twice."""


def is_of_kinds(device: Device | str | None) -> bool:
    """Return whether a device is written as nodes of several kinds."""
    return isinstance(device, str) and "," in device


def parse_kinds(text: str) -> list[tuple[Device, int]]:
    """The devices of `a100-80g:4,v100-32g:4`, and the number of nodes of each.

    Raises:
        InputError: the text does not give two kinds with their nodes, or the kinds cannot train together.
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
