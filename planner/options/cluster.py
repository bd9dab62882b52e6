"""The flags of the cluster: devices, their number, and the links between them."""

from __future__ import annotations

from typing import ClassVar, cast

from costmodels.catalogue import device_names
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.inputs.cluster import DEFAULT_DEVICE, MOST_DEVICES, NetworkKeywords, world_size_of_kinds
from planner.inputs.node_kinds import KINDS, is_of_kinds
from planner.options.flags import flag
from planner.options.limits import Bounds

COUNT = Bounds(f"a whole number from 1 to {MOST_DEVICES}", 1, MOST_DEVICES)
"""Bounds for plausible numbers of devices, nodes and network cards."""


@dataclass(frozen=True)
class HardwareOptions:
    """The devices of a job and the links between them."""

    SECTIONS: ClassVar[dict[str, str]] = {"local_world_size": "Cluster"}

    local_world_size: int | None = flag(None, "Devices of one node; as in the device's usual server.")
    device: str | None = flag(
        None,
        f"Catalogue name of the device (see `devices`), or a file of its fields or of `planner calibrate`; "
        f"{DEFAULT_DEVICE} if none. Nodes of two kinds with the number of each: {KINDS}.",
        values=device_names,
    )
    memory_margin_gib: float | None = flag(
        None,
        "GiB of each device to set aside for driver context, communication buffers and fragmentation, "
        "instead of their estimates; 0 for none.",
        metavar="GIB",
    )
    intra_node_gbps: float | None = flag(
        None,
        "Gigabits per second (8 x GB/s) and direction of one device's fast link (NVLink, HCCS); the data "
        "sheet's unless given.",
    )
    inter_node_gbps: float | None = flag(
        None,
        "Gigabits per second (8 x GB/s) of the network between nodes: of one card with --nics-per-node, "
        "otherwise of one device's share of the cards.",
    )
    island: int | None = flag(
        None,
        "Devices per fast-link domain (NVLink): 8 of a usual node, 72 of an NVL72 rack, or a part of a node.",
        within=COUNT,
    )
    nics_per_node: int | None = flag(None, "Network cards of a node, shared by its devices.", within=COUNT)
    nodes_per_pod: int | None = flag(
        None, "Nodes under the same leaf switches (a rack or pod).", within=COUNT
    )
    oversubscription: float | None = flag(
        None, "Bandwidth of a pod's cards over that of its spine links, such as 2; needs --nodes-per-pod."
    )
    network_table: str | None = flag(
        None,
        "CSV of measured collectives (collective, devices, nodes, busbw_gbs in GB/s, bytes), which replace "
        "the bandwidth of links.",
        metavar="FILE",
    )

    def network(self) -> NetworkKeywords:
        """The links between the devices that flags give."""
        names = NetworkKeywords.__annotations__
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return cast(NetworkKeywords, given)

    def device_count(self) -> int | None:
        """The number of devices that `device` gives for nodes of two kinds; None for one kind."""
        if self.device is None or not is_of_kinds(self.device):
            return None
        return world_size_of_kinds(self.device, self.local_world_size)

    def notes(self) -> list[str]:
        """Assumptions about values that no flag gives."""
        return [] if self.device else [f"no device given: {DEFAULT_DEVICE}"]


@dataclass(frozen=True)
class ClusterOptions(HardwareOptions):
    """The flags of the devices of a job of one size."""

    world_size: int | None = flag(None, "Devices of the job.")

    def required_world_size(self) -> int:
        """The world size, given by its flag or by nodes of two kinds; raises `InputError` when none is
        given."""
        if self.world_size is None:
            counted = self.device_count()
            if counted is not None:
                return counted
            raise InputError("no world size: give --world-size, the number of devices of the job")
        return self.world_size


@dataclass(frozen=True)
class WorldSizesOptions(HardwareOptions):
    """The devices of a job, of which several sizes may be compared."""

    world_size: str | None = flag(
        None,
        "Devices of the job; several (64,96,128) or a range (64..512) for the best plan of each, and the "
        "front of time against cost. Of a range: both ends, and 1, 2, 3, 4, 6, 8, 12, ... whole nodes.",
        metavar="SIZES",
    )

    def required_world_size(self) -> int | str:
        """The world size, or a list or range of them; raises `InputError` when none is given."""
        if self.world_size is None:
            raise InputError("no world size: give --world-size, the number of devices of the job")
        text = self.world_size.strip()
        if "," in text or ".." in text:
            return text
        try:
            return int(text)
        except ValueError:
            raise InputError(
                f"'--world-size': {text!r} is not a whole number; "
                "expected one, or several as 64,128 or 64..512"
            ) from None
