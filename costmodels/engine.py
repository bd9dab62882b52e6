"""`Engine`: who executes the layout. Its constants are data (`catalogue/engines.yaml`)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from costmodels.hardware import Device
from costmodels.words import CountOrZero, Fraction, NonNegative, Positive, Record


class MemoryPolicy(Record):
    """Bytes that an engine keeps and sends for each parameter, for one number format."""

    parameters: NonNegative
    """The copy that matrix products read; sharded by ZeRO 3."""
    gradients: NonNegative
    """Accumulated gradients; sharded by ZeRO 2 and 3."""
    optimizer: NonNegative
    """Master copy and optimizer moments; sharded by ZeRO 1 and above."""
    shard: NonNegative = 0.0
    """A second copy that data parallelism keeps next to the gathered one below ZeRO 3; sharded by ZeRO 1."""
    reduced: Positive = 4.0
    """One gradient element on the wire of a reduction."""
    gathered: Positive = 4.0
    """One parameter on the wire of a gathering."""


class Engine(Record):
    """Constants of one training engine; rates are shares of the device's data-sheet peak."""

    name: str
    memory: dict[str, MemoryPolicy]
    """Bytes per parameter by precision: `fp32`, `fp16`, `bf16`, `fp8`."""
    flash_attention: bool = True
    """Core attention never writes its score matrix to memory."""
    fused_activation: bool = True
    """A gated MLP keeps its two inputs only; otherwise also the activated gate."""
    dropout: bool = False
    """Masks of attention and hidden dropout are kept for backward (GPT-2/3 recipes)."""
    regathers_sequence: bool = True
    """With sequence parallelism backward gathers layer inputs again instead of keeping them whole."""
    eager_reduction_stage: CountOrZero = 2
    """Lowest ZeRO stage that reduces gradients after every micro batch and so keeps shards only."""
    logits_copies: NonNegative = 1.0
    """Copies of the logits in fp32 at the peak of the loss, besides logits and gradient."""
    communicator_bytes: NonNegative = 0.0
    """Device memory of the buffers of one process group."""
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
    tensor_parallel_launch: Positive = 2.0
    """Host time of a layer with tensor-parallel collectives, relative to one without."""
    sequence_parallel_launch: Positive = 2.0
    """The same with sequence parallelism."""
    recompute_stops_early: bool = False
    """Recomputation ends with the last tensor that backward needs: a dense layer's last product and the
    collective after it are not repeated."""
    fp8_cast_bytes: NonNegative = 0.0
    """Traffic of casting one element of an operand of an 8-bit product, for each product that reads it."""
    fp8_experts: bool = True
    """An fp8 recipe computes routed experts in 8 bits too."""
    split_backward_elementwise: Positive = 1.0
    """Element-wise work under a schedule that splits backward, relative to the others."""
    split_backward_launch: Positive = 1.0
    """Host time of a layer under a schedule that splits backward, relative to the others."""
    fully_sharded: bool = False
    """Data parallelism is FSDP2's: what is gathered and reduced is copied out of and into the buffers of the
    collectives, gradients are freed as they are reduced, and fp32 shards are what is offloaded. Otherwise
    parameters and gradients lie in the buffers of the collectives, which are cleared after every step."""
    fused_accumulation: bool = False
    """Matrix products add the gradients of weights to those of earlier micro batches themselves."""
    data_parallel_overlap: Fraction
    """Share of the data-parallel communication that can hide behind computation."""
    fragmentation: NonNegative
    """Extra share of the dynamic memory that the allocator reserves but cannot use."""
    devices: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Constants that differ on an architecture (`Device.architecture`) or a kind of device, by its name."""
    source: str = ""

    @model_validator(mode="after")
    def _check(self) -> Engine:
        allowed = [field for field in Engine.model_fields if field not in ("name", "devices")]
        for key, overrides in self.devices.items():
            unknown = sorted(set(overrides) - set(allowed))
            if unknown:
                raise ValueError(
                    f"engine {self.name} overrides {', '.join(unknown)} for {key} devices; "
                    f"an override is one of {', '.join(allowed)}"
                )
        return self

    def for_device(self, device: Device) -> Engine:
        """The engine with its constants for `device`: those of its architecture, or else of its kind."""
        key = device.architecture if device.architecture in self.devices else device.kind
        constants = self.model_dump(exclude={"devices"})
        return Engine.model_validate({**constants, **self.devices.get(key, {})})
