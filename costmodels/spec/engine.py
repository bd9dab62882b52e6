"""`Engine`: who executes the layout. Its constants are data (`catalogue/engines.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from costmodels.errors import InputError
from costmodels.spec.abilities import Abilities
from costmodels.spec.hardware import Device
from costmodels.spec.record import Count, CountOrZero, Fraction, Name, NonNegative, Positive, Record


class MemoryPolicy(Record):
    """Bytes that an engine keeps and sends for each parameter, for one number format."""

    parameters: NonNegative
    """The copy that matrix products read; sharded by ZeRO 3."""
    gradients: NonNegative
    """Accumulated gradients; sharded by ZeRO 2 and 3."""
    gradients_alone: NonNegative | None = None
    """The same where no other rank holds the parameters; as `gradients` when not given."""
    optimizer: NonNegative
    """Master copy and optimizer moments; sharded by ZeRO 1 and above."""
    shard: NonNegative = 0.0
    """A second copy that data parallelism keeps next to the gathered one below ZeRO 3; sharded by ZeRO 1."""
    reduced: Positive = 4.0
    """One gradient element on the wire of a reduction."""
    gathered: Positive = 4.0
    """One parameter on the wire of a gathering."""
    stepping_whole: NonNegative = 0.0
    """With ZeRO 1 and above, held for each parameter while the optimizer steps: what it gathers."""
    stepping_shard: NonNegative = 0.0
    """The same for each parameter of a rank's shard: what it sends."""


class Spread(Record):
    """The 80 % range of a step time by its causes, as logarithms (`costmodels/time/uncertainty.py`)."""

    base: NonNegative = 0.15
    """Of the whole step: wide where the engine was never measured on the device."""
    narrow: NonNegative = 0.0
    """Of the whole step besides, at a hidden size of 1024; in proportion less for wider models."""
    measured: NonNegative = 0.02
    """Of the whole step instead of all others, where layers of its shape were measured often."""
    network: NonNegative = 0.15
    """Of the share of the step that waits for links, for the first node and for each doubling of nodes."""
    launch: NonNegative = 0.3
    """Of the share in which the device waits for the host."""
    bubble: NonNegative = 0.3
    """Of the share in which the slowest pipeline rank waits for others."""


class MeasuredLayer(Record):
    """How much longer or shorter layers of one shape took than the formulas say."""

    hidden: Count
    tensor_parallel: Count
    tokens: Count
    """Tokens of one micro batch on a device: sequences times their tokens."""
    factor: Positive
    """Measured over predicted time of a layer, forward and backward."""
    rows: Count = 1
    """Measured steps that say so."""


class Engine(Record):
    """Constants of one training engine; rates are shares of the device's data-sheet peak."""

    name: Name
    memory: dict[str, MemoryPolicy]
    """Bytes per parameter by precision: `fp32`, `fp16`, `bf16`, `fp8`."""
    flash_attention: bool = True
    """Core attention never writes its score matrix to memory."""
    softmax_passes: Positive = 1.0
    """Without flash attention: traffic of scale, mask, softmax and dropout, relative to one fused kernel."""
    softmax_batch: CountOrZero = 0
    """The fused softmax kernel takes sequences times heads of one device that are a multiple of this only
    (Megatron-LM's `FusedScaleMaskSoftmax.is_kernel_available`: 4); 0 for a kernel that takes all."""
    unfused_softmax_launch: Positive = 1.0
    """Host time of a layer where that kernel cannot run, relative to where it does."""
    attention_scale: Positive = 1.0
    """Rate of the attention kernel relative to `attention_efficiency`: older ones are slower."""
    norm_passes: Positive = 1.0
    """Traffic of a norm relative to one fused kernel: more for a chain of element-wise ones."""
    norm_bytes: NonNegative = 0.0
    """Kept by a layer's norms and residual sums for each element of the residual stream, besides inputs and
    outputs of norms in the number format of activations: copies in fp32."""
    unfused_norm_bytes: NonNegative = 0.0
    """Kept on top of that where norms are chains of element-wise kernels (`norm_passes` above 1)."""
    keeps_unrotated: bool = False
    """Queries and keys are kept before the rotation of their positions, too."""
    packs_attention: bool = False
    """The attention kernel keeps queries, keys and values packed in one more tensor (FlashAttention 1)."""
    score_bytes: NonNegative | None = None
    """Kept of each attention score without flash attention; the softmax in the number format of activations,
    with dropout also its mask and output, when not given."""
    gathers_logits: bool = False
    """Tensor-parallel ranks gather the logits, and each computes the whole loss."""
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
    score_reserve: NonNegative = 0.0
    """Bytes for each attention score of one layer that the allocator holds and cannot use, without flash
    attention: blocks that large are not given out again in parts."""
    split_logits_copies: NonNegative | None = None
    """The same where tensor-parallel ranks split the vocabulary; as `logits_copies` when not given."""
    loss_apart: bool = False
    """The peaks of the loss and of a recomputed layer count as two moments, of which the fuller decides."""
    held_reductions: NonNegative = 0.0
    """With sequence parallelism, whole outputs of each layer that asynchronous reductions still hold while
    the host runs ahead of the device (`torch.Tensor.record_stream`)."""
    sequence_buffers: NonNegative = 0.0
    """With sequence parallelism, permanent buffers that each hold a whole input of a layer."""
    rotary_tables: bool = False
    """Every layer has a table of its own for the rotation of all positions, in fp32."""
    workspace_bytes: NonNegative = 0.0
    """Workspaces of libraries inside of the allocator: cuBLAS takes one for each stream and thread."""
    communicator_bytes: NonNegative = 0.0
    """Device memory of the buffers of one process group, outside of the allocator."""
    gemm_efficiency: Fraction
    """Share of peak FLOP/s that a large matrix product reaches."""
    whole_head_efficiency: Positive = 1.0
    """Rate of the head's products where one device holds the whole vocabulary, relative to other products."""
    gemm_launch: NonNegative = 5.5e-6
    """Device seconds of a matrix product however small it is."""
    gemm_wave: NonNegative = 0.05
    """Share of a wave of tiles that the end of a matrix product leaves idle."""
    fp32_gemm_efficiency: Fraction | None = None
    """`gemm_efficiency` of 32-bit products, tf32 too, which power limits less; the same when not given."""
    fp8_gemm_efficiency: Fraction | None = None
    """`gemm_efficiency` of 8-bit products; the same when not given."""
    fp8_half_width: NonNegative = 290.0
    """Inner width k at which an 8-bit product runs at half of its rate: k / (k + half)."""
    attention_efficiency: Fraction
    """Share of peak FLOP/s that the attention kernel reaches on long sequences and wide heads."""
    attention_wave: NonNegative = 0.0
    """Share of a wave of blocks of 128 queries, one a multiprocessor, that flash attention leaves idle."""
    attention_half_seq: NonNegative = 0.0
    """Tokens at which flash attention runs at half of that rate: s / (s + half)."""
    attention_half_head: NonNegative = 0.0
    """Elements of a head at which it does: d / (d + half)."""
    memory_efficiency: Fraction
    """Share of memory bandwidth that element-wise work reaches."""
    network_efficiency: Fraction
    """Share of link bandwidth that a large collective reaches."""
    inter_node_efficiency: Fraction | None = None
    """The same of links between nodes; as `network_efficiency` when not given."""
    collective_latency: NonNegative = 0.0
    """Seconds of one call of a collective on top of the hops of its links: launch and synchronisation."""
    message_latency: NonNegative = 0.0
    """Seconds of a message between pipeline stages on top of that."""
    scatters_messages: bool = False
    """Every tensor-parallel rank sends a part of what pipeline stages exchange; the receivers gather it."""
    waits_for_messages: bool = False
    """Ranks of an interleaved pipeline compute nothing while they send, as those of 1F1B."""
    ring_step: NonNegative = 0.0
    """Seconds of a tensor-parallel collective between nodes for each rank of its group."""
    reduction_bucket: NonNegative = 0.0
    """Bytes of parameters whose gradients one all-reduce of ZeRO 0 takes, while ZeRO 1 and above exchange
    all in one call; where it is 0, each layer is a call."""
    sharded_efficiency: Annotated[Fraction, Field(gt=0)] = 1.0
    """Bandwidth of ZeRO 1 and above, which pack and unpack shards, relative to other collectives."""
    shard_launch: NonNegative = 0.0
    """Host seconds to cut what a layer exchanges into shards, for each of them, with ZeRO 1 and above."""
    step_reductions: NonNegative = 0.0
    """All-reduces of a few bytes among all devices that end a step: of the gradient norm and the loss."""
    elementwise_passes: Positive
    """Fused element-wise work as a multiple of the minimal traffic (one read and one write per tensor)."""
    loss_bytes: NonNegative = 24.0
    """Memory traffic of cross entropy for each logit, forward and backward, at `elementwise_passes` of 1."""
    kernel_gaps: NonNegative = 0.0
    """Seconds that one layer's forward pass loses between its kernels, however large they are; backward
    loses twice as much."""
    layer_overhead: NonNegative
    """Host seconds to launch one layer's forward pass: the floor under small layers."""
    backward_launch: Positive = 1.0
    """Host time of a layer's backward pass, relative to its forward pass."""
    launch_sharpness: Annotated[float, Field(ge=1)] = 8.0
    """Exponent of the p-norm that joins the device time of a pass of a layer and its launch floor: small
    where the device waits for the host in some parts of a layer and the host for the device in others."""
    tensor_parallel_launch: Positive = 1.0
    """Factor of the host time of a layer for each doubling of tensor parallelism in a node."""
    sequence_parallel_launch: Positive = 1.0
    """The same with sequence parallelism."""
    node_launch: NonNegative = 1.0
    """Exponent of the islands (nodes, unless the device says otherwise) that a tensor-parallel group spans in
    the host time of a layer."""
    tensor_parallel_step: NonNegative = 0.0
    """Host seconds of a layer's forward pass for each tensor-parallel rank of a node, on top of that: where
    the host waits for every step of a ring."""
    saves_alternate_products: bool = False
    """Selective recomputation of a dense layer, unless modules are named, saves its input, the output of
    attention and of every second matrix product: those of queries, values, the first of the MLP and its last
    (torchtitan's policy `op`)."""
    recompute_stops_early: bool = False
    """Recomputation ends with the last tensor that backward needs: a dense layer's last product and the
    collective after it are not repeated."""
    compiled_keeps_gathered: bool = False
    """Layers are compiled, but where backward is split; those keep their gathered inputs for backward even
    where recomputation should drop them."""
    measured_layers: tuple[MeasuredLayer, ...] = ()
    """Corrections of dense layers by their shape, for one device (`costmodels/time/layer_table.py`)."""
    fp8_cast_bytes: NonNegative = 0.0
    """Traffic of casting one element of an operand of an 8-bit product, for each product that reads it."""
    grouped_products: bool = False
    """The products of all experts of a device are one kernel, not one each."""
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
    expert_load: Annotated[float, Field(ge=1)] = 1.0
    """Tokens of the fullest expert-parallel rank over the mean, for which the others wait."""
    dispatches_by_node: bool = False
    """A token travels once to each node that has experts of its, not once to each expert."""
    tensor_parallel_overlap: Fraction = 0.0
    """Share of tensor-parallel collectives that products of the same layer hide, chunk by chunk."""
    data_parallel_overlap: Fraction
    """Share of the data-parallel communication that can hide behind computation."""
    sharded_overlap: Fraction | None = None
    """The same with ZeRO 1 and above; as `data_parallel_overlap` when not given."""
    overlap_sharpness: Annotated[float, Field(ge=1)] = 8.0
    """Exponent of the p-norm that joins what can hide and what it hides behind: large where only what is
    longer shows, small where both slow each other down."""
    fragmentation: NonNegative
    """Extra share of the dynamic memory that the allocator reserves but cannot use: all but model states,
    permanent buffers and workspaces."""
    runs: Abilities = Abilities()
    """Which layouts it can run; all of them in plans that do not say."""
    spread: Spread = Spread()
    """How far measured steps lie from the estimate."""
    devices: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Constants that differ on an architecture (`Device.architecture`) or a kind of device, by its name."""
    source: str = ""

    @property
    def across(self) -> float:
        """Share of the bandwidth of links between nodes that a large collective reaches."""
        own = self.inter_node_efficiency
        return self.network_efficiency if own is None else own

    @model_validator(mode="after")
    def _check(self) -> Engine:
        allowed = [field for field in Engine.model_fields if field not in ("name", "devices", "runs")]
        for key, overrides in self.devices.items():
            unknown = sorted(set(overrides) - set(allowed))
            if unknown:
                raise ValueError(
                    f"engine {self.name} overrides {', '.join(unknown)} for {key} devices; "
                    f"an override is one of {', '.join(allowed)}"
                )
        return self

    def memory_policy(self, precision: str) -> MemoryPolicy:
        """Bytes per parameter in one precision (tf32 stores fp32).

        Raises:
            InputError: the engine does not train in that precision.
        """
        name = "fp32" if precision == "tf32" else precision
        if name not in self.memory:
            raise InputError(
                f"precision {precision}: engine {self.name} does not train in it; "
                f"use {', '.join(self.memory)}"
            )
        return self.memory[name]

    def with_switches(self, switches: Mapping[str, Any]) -> Engine:
        """The engine with other values of some fields, on every device."""
        devices = {
            name: {field: value for field, value in overrides.items() if field not in switches}
            for name, overrides in self.devices.items()
        }
        return Engine.model_validate({**self.model_dump(), **switches, "devices": devices})

    def for_device(self, device: Device) -> Engine:
        """The engine with its constants for `device`: those of its architecture, or else of its kind."""
        if not self.devices:
            return self
        key = device.architecture if device.architecture in self.devices else device.kind
        constants = self.model_dump(exclude={"devices"})
        return Engine.model_validate({**constants, **self.devices.get(key, {})})
