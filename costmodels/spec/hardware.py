"""`Device` and `Cluster`: the hardware of a training job."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from costmodels.spec.record import GIB, Count, Devices, Name, NonNegative, Positive, Record

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
"""Number formats of GEMMs. MXFP8 has one scale per 32 elements, NVFP4 one per 16."""

NARROW: tuple[Precision, ...] = ("fp8", "mxfp8", "nvfp4")
"""Number formats of fewer than 16 bits, which recipes use for the matrices of layers; all else is in bf16."""

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
    """Wiring of devices: through switches that give any two of them the whole bandwidth, or each
    pair by a wire of its own, so that a group has no more than the wires between its members."""


class MeasuredCollective(Record):
    """Bus bandwidth of one collective, as nccl-tests print it."""

    collective: Collective
    devices: Count
    """Ranks of the group."""
    nodes: Count
    """Nodes over which the ranks were spread evenly."""
    bus_bandwidth: Positive
    """Bytes per second: what nccl-tests call busbw, which is the link's whatever the number of ranks."""
    message_bytes: Positive | None = None
    latency: NonNegative = 0.0
    """Seconds of a call however small its message; other groups take it in proportion to their nodes."""

    @model_validator(mode="after")
    def _check(self) -> "MeasuredCollective":
        if self.devices < 2 or self.devices % self.nodes:
            raise ValueError(
                f"{self.devices} devices on {self.nodes} nodes: expected at least 2, as many on every node"
            )
        return self


class Device(Record):
    """One accelerator, with the links that its usual server gives it."""

    name: Name
    vendor: str
    kind: Literal["gpu", "npu", "tpu", "hpu", "neuron", "cpu"] = "gpu"
    """The kind of device: GPU, Ascend NPU, Google's TPU, Gaudi, Trainium or CPU."""
    architecture: str = ""
    """Generation of the design, such as `hopper`: what an engine's constants are fitted for. Devices that
    share it differ by their data-sheet values alone; empty for one that no engine knows."""
    peak_flops: dict[Precision, Positive]
    """Dense FLOP/s by number format, as the data sheet states them (no sparsity)."""
    memory_bytes: Positive
    """Device memory in bytes, as the driver reports it where that is known."""
    memory_bandwidth: Positive
    """Bytes per second."""
    host_bandwidth: Positive = 32.0e9
    """Bytes per second and direction between the device and its host's memory; PCIe 4.0 x16 unless said."""
    host_memory_bandwidth: Positive = 51.2e9
    """One device's share of the bandwidth of its host's memory, in bytes per second; that of a server of 8
    devices and two processors of eight DDR4-3200 channels (DGX A100) unless said."""
    host_memory_bytes: Positive = 192 * GIB
    """One device's share of its host's memory, with room left for the system: three quarters of what servers
    of 8 devices with 2 TiB have (DGX A100 of 80 GB, DGX H100) unless said."""
    cores: Count
    """Streaming multiprocessors, compute units or CPU cores: the width of a wave of tiles."""
    intra_node: Link
    inter_node: Link
    """One device's share of the network cards of the usual server."""
    sharers: Positive = 1.0
    """Ranks that share a core, where a CPU has more ranks than cores; the rates are those of a share, which
    grows while others wait."""
    devices_per_node: Count = 8
    """Devices in the usual server, used when the user does not say."""
    island: Count | None = None
    """Devices that `intra_node` joins: fewer than a node holds, or more than one node's; a node's if None."""
    nics_per_node: Count | None = None
    """Network cards of the usual server; as many as devices if None."""
    context_bytes: NonNegative = 0.0
    """Memory that the driver context and the libraries take before the first tensor."""
    constants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Constants of engines that were measured on this very device, as `Engine.devices` has them, by the name
    of the engine; they come before those of its architecture."""
    collectives: tuple[MeasuredCollective, ...] = ()
    """Collectives that were measured between such devices; they stand for `Cluster.measured` where no table
    is given."""
    announced: bool = False
    """True for a device that nobody can buy yet; its figures are its maker's claims."""
    source: str = ""

    @property
    def default_precision(self) -> Precision:
        """The format that a training run uses when the user does not say."""
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if "bf16" in self.peak_flops else "fp16"


class Cluster(Record):
    """`world_size` equal devices, `devices_per_node` of them in each node, and what joins them."""

    device: Device
    world_size: Devices
    devices_per_node: Devices
    memory_bytes: Positive
    """Bytes of one device that the job may use; the device's own unless overridden."""
    memory_margin_bytes: NonNegative | None = None
    """Bytes of one device set aside for driver context, communicators and what the allocator cannot use;
    as the device and the engine have them if None."""
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
    """A measured sweep of collectives; it replaces the bandwidth of links and the engine's efficiency."""
    parts: tuple["Cluster", ...] = ()
    """Clusters of each kind of node, in the order of their ranks, where there are two. The other fields then
    stand for both (`costmodels.spec.mixed_cluster`): `memory_bytes` is the larger one's, links are the slower
    ones. Where the whole is changed, such as to twice the ranks, memory or links, its parts follow."""

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
        """Devices of one fast-link domain, such as NVLink, whether or not the job has as many."""
        if self.island is not None:
            return self.island
        own, local = self.device.island or self.devices_per_node, self.devices_per_node
        # The island of a server ends with the part of it that a job uses; that of a rack does not.
        return own if own > self.device.devices_per_node else min(own, local)
