"""`Device` and `Cluster`: what the model is trained on."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from costmodels.words import Count, NonNegative, Positive, Record

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
"""Number formats that matrix products run in."""


class Link(Record):
    """One tier of the network, as one device sees it."""

    name: str
    bandwidth: Positive
    """Bytes per second and direction that one device can send (data-sheet value)."""
    latency: NonNegative
    """Seconds of one hop of a collective."""


class Device(Record):
    """One accelerator, with the links that its usual server gives it."""

    name: str
    vendor: str
    kind: Literal["gpu", "npu", "cpu"] = "gpu"
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
    cores: Count
    """Streaming multiprocessors, compute units or CPU cores: the width of a wave of tiles. No formula reads
    it yet; it is what a calibration of wave quantisation needs."""
    intra_node: Link
    inter_node: Link
    devices_per_node: Count = 8
    """Devices in the usual server, used when the user does not say."""
    context_bytes: NonNegative = 0.0
    """Memory that the driver context and the libraries take before the first tensor."""
    source: str = ""

    @property
    def default_precision(self) -> Precision:
        """The format that a training run uses when the user does not say."""
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if "bf16" in self.peak_flops else "fp16"


class Cluster(Record):
    """`world_size` equal devices, `devices_per_node` of them in each node."""

    device: Device
    world_size: Count
    devices_per_node: Count
    memory_bytes: Positive
    """Bytes of one device that the job may use; the device's own unless overridden."""

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        if self.world_size > self.devices_per_node and self.world_size % self.devices_per_node:
            down = self.world_size // self.devices_per_node * self.devices_per_node
            fewer = range(self.devices_per_node - 1, 0, -1)
            local = [size for size in fewer if self.world_size % size == 0][:2]
            raise ValueError(
                f"world size {self.world_size} is not a multiple of local world size "
                f"{self.devices_per_node}; use {down} or {down + self.devices_per_node}, or a local world "
                f"size of {' or '.join(map(str, local))}"
            )
        return self

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.world_size // self.devices_per_node)
