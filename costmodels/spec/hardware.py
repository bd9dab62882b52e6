"""`Device` and `Cluster`: the hardware of a training job."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from costmodels.spec.record import GIB, Count, Devices, Name, NonNegative, Positive, Record

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
"""Number formats of GEMMs. MXFP8 has one scale per 32 elements, NVFP4 one per 16."""

NARROW: tuple[Precision, ...] = ("fp8", "mxfp8", "nvfp4")
"""Number formats of fewer than 16 bits; recipes use them for the matrices of layers, and bf16 for the
rest."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
"""Operations of a group of ranks; `send` is a message from one rank to another."""


class Link(Record):
    """One tier of the network, as one device sees it."""

    name: str
    bandwidth: Positive
    """Bytes per second and direction that one device can send (data-sheet value)."""
    latency: NonNegative
    """Seconds of one hop of a collective."""
    wiring: Literal["switch", "mesh"] = "switch"
    """Wiring of devices: switches give any two devices the whole bandwidth; with a wire for each pair, a
    group only has the wires between its members."""


class MeasuredCollective(Record):
    """Bus bandwidth of one collective, as nccl-tests print it."""

    collective: Collective
    devices: Count
    """Ranks of the group."""
    nodes: Count
    """Nodes over which the ranks were spread evenly."""
    bus_bandwidth: Positive
    """Bytes per second of bus bandwidth (busbw of nccl-tests), which does not depend on the number of
    ranks."""
    message_bytes: Positive | None = None
    latency: NonNegative = 0.0
    """Least seconds of a call, for an empty message; scaled by nodes for other groups."""

    @model_validator(mode="after")
    def _check(self) -> "MeasuredCollective":
        if self.devices < 2 or self.devices % self.nodes:
            raise ValueError(
                f"{self.devices} devices on {self.nodes} nodes: expected at least 2, as many on every node"
            )
        return self


class Device(Record):
    """One accelerator, with the links of its usual server."""

    name: Name
    vendor: str
    kind: Literal["gpu", "npu", "tpu", "hpu", "neuron", "cpu"] = "gpu"
    """The kind of device: GPU, Ascend NPU, Google's TPU, Gaudi, Trainium or CPU."""
    architecture: str = ""
    """Generation of the design, such as `hopper`: engine constants are fitted for an architecture. Devices of
    the same architecture differ only in data-sheet values. Empty for an architecture that no engine knows."""
    peak_flops: dict[Precision, Positive]
    """Dense FLOP/s by number format, as the data sheet states them (no sparsity)."""
    memory_bytes: Positive
    """Device memory in bytes, as reported by the driver if known."""
    memory_bandwidth: Positive
    """Bytes per second."""
    host_bandwidth: Positive = 32.0e9
    """Bytes per second and direction between the device and its host's memory; PCIe 4.0 x16 by default."""
    host_memory_bandwidth: Positive = 51.2e9
    """One device's share of the bandwidth of its host's memory, in bytes per second; by default that of a
    server with 8 devices and two processors of eight DDR4-3200 channels (DGX A100)."""
    host_memory_bytes: Positive = 192 * GIB
    """Bytes of one device's share of its host's memory, with room left for the system; by default three
    quarters of 2 TiB over 8 devices (DGX A100 of 80 GB, DGX H100)."""
    cores: Count
    """Streaming multiprocessors, compute units or CPU cores: the width of a wave of tiles."""
    intra_node: Link
    inter_node: Link
    """Network link of one device: its share of the network cards of the usual server."""
    sharers: Positive = 1.0
    """Ranks that share a core, for a CPU with more ranks than cores; rates are those of one share, which
    grows while other ranks wait."""
    devices_per_node: Count = 8
    """Devices in the usual server, the default number of devices in a node."""
    island: Count | None = None
    """Number of devices that `intra_node` joins: a part of a node, or several nodes; one node if None."""
    nics_per_node: Count | None = None
    """Network cards of the usual server; as many as devices if None."""
    context_bytes: NonNegative = 0.0
    """Bytes of the driver context and the libraries before the first tensor."""
    constants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Engine constants measured on this individual device, by engine name, in the form of `Engine.devices`;
    they precede those of its architecture."""
    collectives: tuple[MeasuredCollective, ...] = ()
    """Collectives measured between such devices; they are used as `Cluster.measured` if no table is given."""
    announced: bool = False
    """True for a device that is not yet sold; its figures are its maker's claims."""
    source: str = ""

    @property
    def default_precision(self) -> Precision:
        """The default number format of a training run."""
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if "bf16" in self.peak_flops else "fp16"


class Cluster(Record):
    """A cluster of `world_size` equal devices, `devices_per_node` in each node, with their links."""

    device: Device
    world_size: Devices
    devices_per_node: Devices
    memory_bytes: Positive
    """Bytes of one device that the job may use; the device's own unless overridden."""
    memory_margin_bytes: NonNegative | None = None
    """Bytes of one device set aside for driver context, communicators and memory that the allocator cannot
    use; estimated from device and engine if None."""
    intra_node: Link | None = None
    """The fast link inside an island; the device's own if None."""
    inter_node: Link | None = None
    """The network between nodes; the device's own if None. Its bandwidth is that of one network card where
    `nics_per_node` is given, and otherwise one device's share of the cards."""
    island: Count | None = None
    """Devices of one fast-link domain, such as NVLink; the device's own if None."""
    nics_per_node: Count | None = None
    """Network cards that the devices of a node share evenly; as in the device's usual server if None."""
    nodes_per_pod: Count | None = None
    """Nodes under the same leaf switches; all if None."""
    oversubscription: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Bandwidth of a pod's network cards over that of its links to the spine."""
    measured: tuple[MeasuredCollective, ...] = ()
    """Measured collectives; they replace the bandwidth of links and the engine's efficiency."""
    parts: tuple["Cluster", ...] = ()
    """Clusters of each kind of node, in the order of ranks, if there are two kinds. The other fields then
    represent both (`costmodels.spec.mixed_cluster`): `memory_bytes` is the larger one, links are the slower
    ones. If the whole is scaled, such as to twice the ranks, memory or links, the parts are scaled too."""

    @model_validator(mode="after")
    def _check(self) -> "Cluster":
        if self.parts:
            self._check_parts()
        local = self.devices_per_node
        if self.world_size > local and self.world_size % local:
            down = self.world_size // local * local
            fewer = [size for size in range(local - 1, 0, -1) if self.world_size % size == 0][:2]
            raise ValueError(
                f"world size {self.world_size} is not a multiple of local world size "
                f"{local}; use {down} or {down + local}, or a local world "
                f"size of {' or '.join(map(str, fewer))}"
            )
        island = self.island
        if island is not None and max(island, local) % min(island, local):
            raise ValueError(
                f"island {island}: expected whole nodes of {local} devices, or a part that divides a node"
            )
        if self.oversubscription > 1 and self.nodes_per_pod is None:
            raise ValueError(
                f"oversubscription {self.oversubscription:g} needs nodes_per_pod, the nodes of a pod; "
                "the network beyond a pod is what is oversubscribed"
            )
        return self

    def _check_parts(self) -> None:
        ranks = [part.world_size for part in self.parts]
        if len(ranks) != 2 or any(part.parts for part in self.parts):
            raise ValueError(f"parts has {len(ranks)} entries: expected nodes of two kinds, each of one kind")
        if self.world_size * ranks[0] % sum(ranks):
            raise ValueError(
                f"world size {self.world_size} is not in the proportion of its parts, {ranks[0]} + {ranks[1]}"
            )
        largest = max(part.memory_bytes for part in self.parts)
        if self.memory_bytes < largest:
            raise ValueError(f"memory_bytes {self.memory_bytes:g} is less than a kind has, {largest:g}")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.world_size // self.devices_per_node)

    @property
    def fast_link(self) -> Link:
        """The link inside an island."""
        return self.intra_node or self.device.intra_node

    @property
    def slow_link(self) -> Link:
        """The network between nodes; its bandwidth is one device's share of the cards of a node."""
        device, cards = self.device, self.nics_per_node
        link = self.inter_node or device.inter_node
        if cards is None:
            return link
        card = link.bandwidth
        if self.inter_node is None:
            card *= device.devices_per_node / (device.nics_per_node or device.devices_per_node)
        return link.model_copy(update={"bandwidth": card * cards / self.devices_per_node})

    @property
    def joined(self) -> int:
        """Devices of one fast-link domain, such as NVLink; may exceed the devices of the job."""
        if self.island is not None:
            return self.island
        own, local = self.device.island or self.devices_per_node, self.devices_per_node
        # The island of a server ends with the part of it that a job uses; that of a rack does not.
        return own if own > self.device.devices_per_node else min(own, local)
