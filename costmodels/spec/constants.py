"""Constants of a training engine in groups by subject; rates are shares of the device's data-sheet peak."""

from typing import Annotated, Literal

from pydantic import Field

from costmodels.spec.layout import Fp8Recipe
from costmodels.spec.record import CountOrZero, Fraction, NonNegative, Positive, Record


class Constants(Record):
    """A group of constants; its name is that of the field of `costmodels.spec.engine.Engine`."""


class RecipeConstants(Record):
    """Constants of GEMMs in one fp8 recipe that differ from the engine's default recipe."""

    efficiency: Fraction | None = None
    """Value of `fp8_efficiency` for the recipe."""
    cast_bytes: NonNegative | None = None
    """Value of `fp8_cast_bytes` for the recipe, of activations, too."""
    weights_once: bool = False
    """Value of `fp8_weights_once` for the recipe."""


class GemmConstants(Constants):
    """Constants of GEMMs."""

    efficiency: Fraction
    """Share of peak FLOP/s that a large GEMM reaches."""
    whole_head_efficiency: Positive = 1.0
    """Rate of the head's GEMMs where one device holds the whole vocabulary, relative to other GEMMs."""
    launch: NonNegative = 5.5e-6
    """Device seconds of a GEMM however small it is."""
    wave: NonNegative = 0.05
    """Share of a wave of tiles that is idle at the end of a GEMM."""
    fp32_efficiency: Fraction | None = None
    """`efficiency` of 32-bit GEMMs (also tf32), which power limits slow down less; the same when not
    given."""
    fp8_efficiency: Fraction | None = None
    """`efficiency` of 8-bit GEMMs; the same when not given."""
    fp4_efficiency: Fraction | None = None
    """`efficiency` of 4-bit GEMMs, including the cast of operands; `fp8_efficiency` if None."""
    fp8_half_width: NonNegative = 290.0
    """Inner width k at which an 8-bit GEMM runs at half of its rate: k / (k + half)."""
    fp8_cast_bytes: NonNegative = 0.0
    """Traffic of casting one element of an operand of an 8-bit GEMM, for each GEMM that reads it."""
    fp8_activation_cast_bytes: NonNegative | None = None
    """Value of `fp8_cast_bytes` for activations and their gradients; equal to it if None."""
    fp8_weights_once: bool = False
    """Weights that no rank shards are cast once a step to fp8, for all microbatches and GEMMs."""
    fp8_recipes: dict[Fp8Recipe, RecipeConstants] = Field(default_factory=dict)
    """Constants that depend on `Layout.fp8_recipe`."""
    fused_accumulation: bool = False
    """True if weight-gradient GEMMs add to the sum of earlier microbatches."""
    fused_plain: bool = False
    """True if GEMMs in 16 bits do so in compiled layers that FSDP2 does not wrap (`plain_whole`), outside of
    routed experts."""

    def of_recipe(self, recipe: Fp8Recipe) -> "GemmConstants":
        """The constants for fp8 with the given recipe."""
        own = self.fp8_recipes.get(recipe)
        if own is None:
            return self
        efficiency = self.fp8_efficiency if own.efficiency is None else own.efficiency
        cast_bytes = self.fp8_cast_bytes if own.cast_bytes is None else own.cast_bytes
        own_values = {
            "fp8_efficiency": efficiency,
            "fp8_cast_bytes": cast_bytes,
            "fp8_activation_cast_bytes": self.fp8_activation_cast_bytes if own.cast_bytes is None else None,
            "fp8_weights_once": own.weights_once,
        }
        return self.model_copy(update=own_values)


class AttentionConstants(Constants):
    """Constants of core attention."""

    flash: bool = True
    """True for flash attention, which never writes its score matrix to memory."""
    efficiency: Fraction
    """Share of peak FLOP/s that the attention kernel reaches on long sequences and wide heads."""
    scale: Positive = 1.0
    """Rate of the attention kernel relative to `efficiency`; older kernels are slower."""
    wave: NonNegative = 0.0
    """Share of a wave that flash attention leaves idle; a wave has one block of 128 queries for each
    multiprocessor."""
    half_seq: NonNegative = 0.0
    """Sequence length s, in tokens, at which flash attention has half of its full rate: s / (s + half)."""
    half_head: NonNegative = 0.0
    """Head size d, in elements, at which flash attention has half of its full rate: d / (d + half)."""
    backward_rate: Positive = 63 / 73
    """Backward over forward FLOP/s of flash attention: 63 % and 73 % of an A100's peak (arXiv:2307.08691)."""
    backward_half_seq: Positive = 1.0
    """`half_seq` of the backward pass, relative to that of the forward pass."""
    score_passes: Positive = 4.0
    """Reads and writes of the score matrix in a forward pass without flash attention: one kernel for scale,
    mask and softmax between two GEMMs. Dropout reads and writes it once more, and one byte of mask."""
    score_passes_backward: Positive = 7.0
    """Reads and writes of the score matrix and of its gradient in a backward pass, as for `score_passes`."""
    softmax_passes: Positive = 1.0
    """Memory traffic of scale, mask, softmax and dropout without flash attention, relative to one fused
    kernel."""
    softmax_batch: CountOrZero = 0
    """Divisor of sequences times heads of one device that the fused softmax kernel requires (Megatron-LM's
    `FusedScaleMaskSoftmax.is_kernel_available`: 4); 0 for a kernel without this limit."""


class ElementwiseConstants(Constants):
    """Constants of work that is bound by memory bandwidth."""

    efficiency: Fraction
    """Share of memory bandwidth that element-wise work reaches."""
    passes: Positive
    """Fused element-wise work as a multiple of the minimal traffic (one read and one write per tensor)."""
    norm_passes: Positive = 1.0
    """Traffic of a norm relative to one fused kernel; more for a chain of element-wise kernels."""
    loss_bytes: NonNegative = 24.0
    """Memory traffic of cross entropy for each logit, forward and backward, at `passes` of 1."""
    update_passes: Positive = 1.0
    """Traffic of the optimizer's update relative to one read and one write of its tensors."""
    accumulation_passes: Positive = 1.0
    """Traffic of adding 16-bit gradients to an fp32 sum, relative to one read and one write of these."""
    split_backward: Positive = 1.0
    """Element-wise work under schedules that split backward, relative to other schedules."""


class NetworkConstants(Constants):
    """Constants of collectives and messages."""

    efficiency: Fraction
    """Share of link bandwidth that a large collective reaches."""
    inter_node_efficiency: Fraction | None = None
    """Share of the bandwidth of links between nodes; `efficiency` when not given."""
    sharded_efficiency: Annotated[Fraction, Field(gt=0)] = 1.0
    """Bandwidth of the collectives of ZeRO 1 and above, which pack and unpack shards, relative to others."""
    collective_latency: NonNegative = 0.0
    """Seconds of one call of a collective on top of the hops of its links: launch and synchronisation."""
    message_latency: NonNegative = 0.0
    """Seconds of a message between pipeline stages on top of `collective_latency`."""
    meanwhile_latency: NonNegative = 0.0
    """Further seconds of a message where ranks compute while they send, as gloo's threads wait for a core."""
    context_latency: NonNegative = 0.0
    """Seconds of a layer's context-parallel exchange, forward or backward, on top of `collective_latency`."""
    dispatch_latency: NonNegative = 0.0
    """Seconds of a dispatch to experts on top of `collective_latency`."""
    ring_step: NonNegative = 0.0
    """Seconds of a tensor-parallel collective between nodes for each rank of its group."""
    scatters_messages: bool = False
    """True if every tensor-parallel rank sends a part of the message between stages, and receivers gather
    it."""
    waits_for_messages: bool = False
    """True if ranks of an interleaved pipeline do not compute while they send, like those of 1F1B."""
    reduction_bucket: NonNegative = 0.0
    """Bytes of parameters in one gradient all-reduce of ZeRO 0; ZeRO 1 and above then exchange all in one
    call. If 0, each layer is a call."""
    step_reductions: NonNegative = 0.0
    """Number of small all-reduces among all devices at the end of a step, for the gradient norm and the
    loss."""

    @property
    def between_nodes(self) -> float:
        """Share of the bandwidth of links between nodes that a large collective reaches."""
        between = self.inter_node_efficiency
        return self.efficiency if between is None else between


class HostConstants(Constants):
    """Host time to launch the kernels of a layer: the floor under small layers."""

    layer_overhead: NonNegative
    """Host seconds to launch one layer's forward pass: the floor under small layers."""
    kernel_gaps: NonNegative = 0.0
    """Idle seconds between the kernels of one layer's forward pass, for kernels of any size; twice as many in
    backward."""
    graph_gaps: NonNegative = 0.0
    """Idle seconds between the kernels of one layer's forward pass that a CUDA graph removes, for kernels of
    any size; twice as many in backward."""
    backward: Positive = 1.0
    """Host time of a layer's backward pass, relative to its forward pass."""
    sharpness: Annotated[float, Field(ge=1)] = 8.0
    """Exponent of the p-norm that combines a layer's device time and its launch floor. It is small if the
    device waits for the host in some parts of a layer, and the host for the device in others."""
    tensor_parallel: Positive = 1.0
    """Factor of the host time of a layer for each doubling of tensor parallelism in a node."""
    sequence_parallel: Positive = 1.0
    """Factor for each doubling of tensor parallelism with sequence parallelism."""
    nodes: NonNegative = 1.0
    """Exponent of the islands (nodes, unless the device says otherwise) that a tensor-parallel group spans in
    the host time of a layer."""
    tensor_parallel_step: NonNegative = 0.0
    """Further host seconds of a layer's forward pass for each tensor-parallel rank of a node, where the host
    waits for every step of a ring."""
    unfused_softmax: Positive = 1.0
    """Host time of a layer with unfused softmax (`softmax_batch`), relative to other layers."""
    split_backward: Positive = 1.0
    """Host time of a layer under schedules that split backward, relative to other schedules."""
    plain: Positive = 1.0
    """Host time of a layer with unwrapped parameters (`plain_whole`), relative to other layers."""
    chained: Positive = 1.0
    """Host time of an unwrapped layer in a chain of compiled layers, relative to other layers."""
    shard: NonNegative = 0.0
    """Host seconds for each shard into which a layer's exchange is cut, with ZeRO 1 and above."""
    step: NonNegative = 0.0
    """Host seconds of a step besides its passes: clipping, the optimizer's launches, the loss."""
    graph: bool = False
    """True if a step is one CUDA graph (Megatron-Core's `--cuda-graph-impl full_iteration`): the device never
    waits for launches, and experts get their numbers of rows without the host."""
    graphed: Fraction = 0.0
    """Share of the launches of a layer with experts that CUDA graphs of its parts remove.

    Its parts are attention, the router and what prepares the exchange (Megatron-Core's `--cuda-graph-scope
    attn moe_router moe_preprocess`)."""
    routing: NonNegative = 0.0
    """Further host seconds of the forward pass of a layer with experts: the host waits for the routers'
    numbers of tokens, and launches the experts' kernels one after the other."""


class OverlapConstants(Constants):
    """Constants of the overlap of communication with computation."""

    tensor_parallel: Fraction = 0.0
    """Share of tensor-parallel collectives that GEMMs of the same layer hide, chunk by chunk."""
    data_parallel: Fraction
    """Share of the data-parallel communication that can hide behind computation."""
    expert_parallel: Fraction = 0.0
    """Share of the dispatch to experts that passes of another microbatch hide (Megatron-Core's
    `--overlap-moe-expert-parallel-comm`)."""
    sharded: Fraction | None = None
    """Share that can hide with ZeRO 1 and above; `data_parallel` when not given."""
    gathered: Fraction | None = None
    """Share that can hide with ZeRO 3, which prefetches its all-gathers; `sharded` when not given."""
    sharpness: Annotated[float, Field(ge=1)] = 8.0
    """Exponent of the p-norm that combines communication and the computation that hides it. It is large if
    only the longer one shows, and small if both slow each other down."""


class ActivationConstants(Constants):
    """Constants of the tensors that a layer keeps for its backward pass."""

    norm_bytes: NonNegative = 0.0
    """Bytes of a layer's norms and residual sums for each element of the residual stream, besides inputs and
    outputs of norms in the number format of activations: copies in fp32."""
    unfused_norm_bytes: NonNegative = 0.0
    """Bytes on top of `norm_bytes` where norms are chains of element-wise kernels (`norm_passes` above 1)."""
    score_bytes: NonNegative | None = None
    """Bytes of each attention score without flash attention; if not given, the softmax in the number format
    of activations, and with dropout also its mask and output."""
    keeps_unrotated: bool = False
    """True if queries and keys before rotary embedding are kept too."""
    packs_attention: bool = False
    """True if the attention kernel keeps queries, keys and values packed in one more tensor (FlashAttention
    1)."""
    fused_activation: bool = True
    """True if a gated MLP keeps only its two inputs; otherwise it also keeps the activated gate."""
    dropout: bool = False
    """True if masks of attention and hidden dropout are kept for backward (GPT-2/3 recipes)."""
    regathers_sequence: bool = True
    """True if backward gathers layer inputs again with sequence parallelism, instead of keeping them
    whole."""
    saves_alternate_products: bool = False
    """True if selective recomputation without named modules saves a layer's input, the output of attention,
    and the output of every second GEMM: queries, values, the first and the last one of the MLP. Grouped GEMMs
    of experts are repeated, and dispatch is saved (torchtitan's policy `op`)."""
    recompute_stops_early: bool = False
    """True if recomputation ends with the last tensor that backward needs, so that a dense layer's last GEMM
    and the collective after it are not repeated."""
    expert_outputs: bool = True
    """True if outputs of experts are kept for the gradients of their probabilities; otherwise the
    probabilities scale the input of the last GEMM."""
    drops_rows: bool = False
    """True if experts with a limited capacity process only their received rows, without padding to the
    capacity."""
    row_copies: NonNegative = 0.0
    """Number of copies of routed experts' rows in transfer, and of their gradients, during a layer's
    backward, besides its kept tensors."""
    fp8_inputs: bool = False
    """True if an fp8 recipe keeps the inputs of a layer's GEMMs in 8 bits only."""
    plain_delta_rule: bool = False
    """True if linear attention runs in plain fp32 operators, which keep their chunks' products for
    backward."""
    joins_latents: bool = False
    """True if tensor-parallel ranks copy the compressed tensors of latent attention into one, together with
    the input of queries that are not compressed."""
    inner_gradients: bool = False
    """True if the gradients of an MLP's inner tensors and matrices count during its layer's backward."""
    compiled: bool = False
    """True if layers are compiled, except under split backward. A compiled layer recomputes the activated
    gate from its inputs, and the output of attention with its kernel. It keeps gathered tensors even where
    recomputation should drop them."""


class LossConstants(Constants):
    """Constants of the memory of the head and the loss."""

    logits_copies: NonNegative = 1.0
    """Copies of the logits in fp32 at the peak of the loss, besides logits and gradient."""
    split_logits_copies: NonNegative | None = None
    """Copies where tensor-parallel ranks split the vocabulary; `logits_copies` when not given."""
    apart: bool = False
    """True if the peaks of the loss and of a recomputed layer are two separate moments; the fuller one
    counts."""
    chunked: bool = False
    """True if the head's GEMM and the loss are one operation on chunks of tokens
    (`costmodels.layers.shapes.loss_chunks`), which computes the gradients of tokens and matrix in forward."""
    gathers_logits: bool = False
    """True if tensor-parallel ranks gather the logits, and each computes the whole loss."""


class AllocatorConstants(Constants):
    """Constants of memory besides model states, activations and logits."""

    fragmentation: NonNegative
    """Extra share of the dynamic memory that the allocator reserves but cannot use; dynamic memory is all
    except model states, permanent buffers and workspaces."""
    gathering_reserve: NonNegative = 0.0
    """Bytes that the allocator holds but cannot use for each parameter gathered by ZeRO 1 and above: blocks
    that are allocated and freed with every layer fragment the heap of a CPU process."""
    score_reserve: NonNegative = 0.0
    """Bytes for each attention score of one layer that the allocator holds but cannot use, without flash
    attention: such large blocks are not split for reuse."""
    reduction_outputs: NonNegative = 0.0
    """Number of whole outputs of each layer held by asynchronous reductions of sequence parallelism while the
    host runs ahead of the device (`torch.Tensor.record_stream`)."""
    sequence_buffers: NonNegative = 0.0
    """Number of permanent buffers of sequence parallelism, each for a whole input of a layer."""
    rotary_tables: bool = False
    """True if every layer has its own fp32 table of rotary embeddings for all positions."""
    workspace_bytes: NonNegative = 0.0
    """Bytes of library workspaces inside of the allocator: cuBLAS has one for each stream and thread."""
    communicator_bytes: NonNegative = 0.0
    """Bytes of device memory for the buffers of one process group, outside of the allocator."""


class MemoryRangeConstants(Constants):
    """Half the width of the range of a step's tensor bytes by kind of layout, as a share; the widest of
    several kinds counts."""

    usual: NonNegative = 0.0
    """Share for all other layouts."""
    experts: NonNegative = 0.0
    ring: NonNegative = 0.0
    """Share for ring context parallelism."""
    split_backward: NonNegative = 0.0
    zbv: NonNegative = 0.0
    full_recompute: NonNegative = 0.0
    unusual_recompute: NonNegative = 0.0
    """Share for recomputation of blocks, or of several layers from one input."""
    further_tokens: NonNegative = 0.0
    """Share for models with MTP modules."""
    linear: NonNegative = 0.0
    """Share for layers with linear attention."""
    capped: NonNegative = 0.0
    """Share for capped attention scores."""
    windows: NonNegative = 0.0
    capacity: NonNegative = 0.0
    """Share for experts with a limited capacity."""
    adapters: NonNegative = 0.0
    formats: NonNegative = 0.0
    """Share for number formats other than 16-bit ones."""
    optimizers: NonNegative = 0.0
    """Share for optimizers whose states are smaller than the weights."""
    offload: NonNegative = 0.0
    graphs: NonNegative = 0.0
    """Share for CUDA graphs."""


class ShardingConstants(Constants):
    """Constants of data-parallel sharding and reduction."""

    eager_reduction_stage: CountOrZero = 2
    """Lowest ZeRO stage that reduces gradients after every microbatch and so keeps shards only."""
    single_reduction_stage: CountOrZero = 2
    """Lowest ZeRO stage that keeps only shards if a step has a single microbatch and so does not
    accumulate."""
    fully_sharded: bool = False
    """True for FSDP2's data parallelism: tensors are copied out of and into the buffers of the collectives,
    gradients are freed as they are reduced, and fp32 shards are offloaded. Otherwise parameters and gradients
    are stored in the buffers of the collectives, which are cleared after every step."""
    live_parameters: NonNegative = 0.0
    """Number of parameters that ZeRO 3 holds gathered at a time; if 0, those of the current and the next
    layer, and of embedding and head."""
    narrow_moments: bool = False
    """True if Adam's two moments are in 16 bits (Megatron-Core's `--use-precision-aware-optimizer`)."""
    copies_moment: bool = False
    """True if Adam's step copies one moment of all parameters that a rank updates, as PyTorch's operators on
    lists of tensors do (`foreach`); fused kernels do not."""
    stepping_group: NonNegative = 0.0
    """Most parameters of a rank's shard that ZeRO 3 updates at a time; if 0, all of them."""
    secondary_shards: CountOrZero = 0
    """Number of neighbouring ranks that share a second 16-bit copy of the parameters with ZeRO 3, from which
    all but the first pass of a step gather (ZeRO++'s hpZ, arXiv:2306.10209); 0 without one."""
    narrow_stages: tuple[CountOrZero, ...] = ()
    """ZeRO stages in which weights, gradients and moments are all in 16 bits, without a copy in fp32."""
    ends_apart: bool = False
    """True if embedding and head are gathered separately, like layers, and not together."""
    joins_experts: bool = False
    """True if FSDP2 wraps a layer's experts together with the layer, and not by themselves."""
    plain_whole: bool = False
    """True if FSDP2 does not wrap parameters that a rank holds whole and updates itself: these are cast to
    plain tensors, and their gradients accumulate in the buffer of the reduction."""


class ExpertConstants(Constants):
    """Constants of layers with experts."""

    load: Annotated[float, Field(ge=1)] | None = None
    """Tokens of the fullest expert-parallel rank, for which the others wait, over the mean; that of natural
    routing (`costmodels.layers.expert_load`) if None."""
    grouped: bool = False
    """True if the GEMMs of all experts of a device are one kernel."""
    dispatch_rate: Positive = 1.0
    """Bandwidth of dispatch relative to that of other collectives; special kernels come near the rate of the
    links."""
    copy_passes: Positive = 1.0
    """Memory traffic of permuting copies of tokens to the order of experts and back, relative to one read and
    one write on either side of the dispatch; more where they are padded, scaled or cast."""
    fused: bool = False
    """True if grouped kernels include activation, scaling and casts, and dispatch delivers tokens in the
    order of experts. Then there is no memory traffic besides that of the GEMMs."""
    padding: NonNegative = 0.0
    """Rows of padding in each GEMM of an expert: half a tile on average."""
    fp8: bool = True
    """True if an fp8 recipe computes routed experts in 8 bits too."""
    buffers: Literal["", "deepep", "hybridep"] = ""
    """Library whose own buffers exchange tokens (`costmodels.memory.dispatch_buffers`); none if empty."""
    reach: Positive = 8.0
    """Number of ranks that HybridEP reaches through memory: those on the same fast links."""
    dispatch_cores: CountOrZero = 0
    """Number of multiprocessors that dispatch uses while passes of another microbatch hide it."""
    dispatches_by_node: bool = False
    """True if a token is sent once to each node with one of its experts, not once to each expert."""


class MuonConstants(Constants):
    """Constants of the optimizer step of Muon, which updates whole matrices."""

    layer_wise: bool = False
    """True if ZeRO divides whole matrices among ranks, so that a rank updates its own ones without gathering
    momentum."""
    gathered: Positive | None = None
    """Bytes of an element of momentum sent between ranks; those of the activations' format if None."""


class CheckpointConstants(Constants):
    """Memory of saving and reading checkpoints; None where the engine's way is not known."""

    host_copies: NonNegative | None = None
    """Number of host-memory copies of a device's part, while training waits for the files."""
    resume_states: NonNegative | None = None
    """Number of further copies of the optimizer's moments on the device while a checkpoint is read."""
