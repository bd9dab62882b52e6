"""`Engine`: who executes the layout. Its constants are data (`catalogue/engines.yaml`)."""

from __future__ import annotations

from costmodels.words import Fraction, NonNegative, Positive, Record


class MemoryPolicy(Record):
    """Bytes that an engine keeps for each parameter, for one number format."""

    parameters: NonNegative
    """The copy that matrix products read; sharded by ZeRO 3."""
    gradients: NonNegative
    """Accumulated gradients; sharded by ZeRO 2 and 3."""
    optimizer: NonNegative
    """Master copy and optimizer moments; sharded by ZeRO 1 and above."""


class Engine(Record):
    """Constants of one training engine; rates are shares of the device's data-sheet peak."""

    name: str
    memory: dict[str, MemoryPolicy]
    """Bytes per parameter by precision: `fp32`, `fp16`, `bf16`, `fp8`."""
    flash_attention: bool = True
    """Core attention never writes its score matrix to memory."""
    gemm_efficiency: Fraction
    """Share of peak FLOP/s that a large matrix product reaches."""
    attention_efficiency: Fraction
    """Share of peak FLOP/s that the attention kernel reaches."""
    memory_efficiency: Fraction
    """Share of memory bandwidth that element-wise work reaches."""
    network_efficiency: Fraction
    """Share of link bandwidth that a large collective reaches."""
    elementwise_passes: Positive
    """Fused element-wise work as a multiple of the minimal traffic (one read and one write per tensor)."""
    layer_overhead: NonNegative
    """Host seconds to launch one layer's forward pass: the floor under small layers."""
    data_parallel_overlap: Fraction
    """Share of the data-parallel communication that can hide behind the last backward pass."""
    fragmentation: NonNegative
    """Extra share of the dynamic memory that the allocator reserves but cannot use."""
    source: str = ""
