"""Constants of a training engine, by what they are of; rates are shares of the device's data-sheet peak."""

from typing import Annotated, Literal

from pydantic import Field

from costmodels.spec.layout import Fp8Recipe
from costmodels.spec.record import CountOrZero, Fraction, NonNegative, Positive, Record


class Constants(Record):
    """A group of constants, named as the field of `costmodels.spec.engine.Engine` that has it."""


class RecipeConstants(Record):
    """GEMMs of one recipe of fp8, where they differ from what the engine does unless it is told."""

    efficiency: Fraction | None = None
    """`fp8_efficiency` of the recipe."""
    cast_bytes: NonNegative | None = None
    """`fp8_cast_bytes` of the recipe."""


class GemmConstants(Constants):
    """GEMMs."""

    efficiency: Fraction
    """Share of peak FLOP/s that a large GEMM reaches."""
    whole_head_efficiency: Positive = 1.0
    """Rate of the head's GEMMs where one device holds the whole vocabulary, relative to other GEMMs."""
    launch: NonNegative = 5.5e-6
    """Device seconds of a GEMM however small it is."""
    wave: NonNegative = 0.05
    """Share of a wave of tiles that the end of a GEMM leaves idle."""
    fp32_efficiency: Fraction | None = None
    """`efficiency` of 32-bit GEMMs, tf32 too, which power limits less; the same when not given."""
    fp8_efficiency: Fraction | None = None
    """`efficiency` of 8-bit GEMMs; the same when not given."""
    fp4_efficiency: Fraction | None = None
    """`efficiency` of 4-bit GEMMs, with what it takes to cast their operands; `fp8_efficiency` if None."""
    fp8_half_width: NonNegative = 290.0
    """Inner width k at which an 8-bit GEMM runs at half of its rate: k / (k + half)."""
    fp8_cast_bytes: NonNegative = 0.0
    """Traffic of casting one element of an operand of an 8-bit GEMM, for each GEMM that reads it."""
    fp8_recipes: dict[Fp8Recipe, RecipeConstants] = Field(default_factory=dict)
    """Constants that depend on `Layout.fp8_recipe`."""
    fused_accumulation: bool = False
    """GEMMs add the gradients of weights to those of earlier microbatches themselves."""

    def of_recipe(self, recipe: Fp8Recipe) -> "GemmConstants":
        """The constants where fp8 is computed by one recipe."""
        own = self.fp8_recipes.get(recipe)
        if own is None:
            return self
        efficiency = self.fp8_efficiency if own.efficiency is None else own.efficiency
        cast_bytes = self.fp8_cast_bytes if own.cast_bytes is None else own.cast_bytes
        return self.model_copy(update={"fp8_efficiency": efficiency, "fp8_cast_bytes": cast_bytes})


class AttentionConstants(Constants):
    """Core attention."""

    flash: bool = True
    """Core attention never writes its score matrix to memory."""
    efficiency: Fraction
    """Share of peak FLOP/s that the attention kernel reaches on long sequences and wide heads."""
    scale: Positive = 1.0
    """Rate of the attention kernel relative to `efficiency`: older ones are slower."""
    wave: NonNegative = 0.0
    """Share of a wave of blocks of 128 queries, one a multiprocessor, that flash attention leaves idle."""
    half_seq: NonNegative = 0.0
    """Tokens at which flash attention runs at half of that rate: s / (s + half)."""
    half_head: NonNegative = 0.0
    """Elements of a head at which it does: d / (d + half)."""
    backward_rate: Positive = 63 / 73
    """Backward over forward FLOP/s of flash attention: 63 % and 73 % of an A100's peak (arXiv:2307.08691)."""
    backward_half_seq: Positive = 1.0
    """`half_seq` of the backward pass, relative to that of the forward pass."""
    score_passes: Positive = 4.0
    """Reads and writes of the score matrix in a forward pass without flash attention: one kernel for scale,
    mask and softmax between two GEMMs. Dropout reads and writes it once more, and one byte of mask."""
    score_passes_backward: Positive = 7.0
    """Reads and writes of the score matrix and of its gradient in a backward pass, in the same way."""
    softmax_passes: Positive = 1.0
    """Traffic without flash attention of scale, mask, softmax and dropout, relative to one fused kernel."""
    softmax_batch: CountOrZero = 0
    """The fused softmax kernel takes sequences times heads of one device that are a multiple of this only
    (Megatron-LM's `FusedScaleMaskSoftmax.is_kernel_available`: 4); 0 for a kernel that takes all."""


class ElementwiseConstants(Constants):
    """Work that is bound by the bandwidth of memory."""

    efficiency: Fraction
    """Share of memory bandwidth that element-wise work reaches."""
    passes: Positive
    """Fused element-wise work as a multiple of the minimal traffic (one read and one write per tensor)."""
    norm_passes: Positive = 1.0
    """Traffic of a norm relative to one fused kernel: more for a chain of element-wise ones."""
    loss_bytes: NonNegative = 24.0
    """Memory traffic of cross entropy for each logit, forward and backward, at `passes` of 1."""
    update_passes: Positive = 1.0
    """Traffic of the optimizer's update relative to one read and one write of what it touches."""
    accumulation_passes: Positive = 1.0
    """Traffic of adding 16-bit gradients to a sum in fp32, in the same way."""
    split_backward: Positive = 1.0
    """Element-wise work under a schedule that splits backward, relative to the others."""


class NetworkConstants(Constants):
    """Collectives and messages."""

    efficiency: Fraction
    """Share of link bandwidth that a large collective reaches."""
    inter_node_efficiency: Fraction | None = None
    """Share of the bandwidth of links between nodes; as `efficiency` when not given."""
    sharded_efficiency: Annotated[Fraction, Field(gt=0)] = 1.0
    """Bandwidth of ZeRO 1 and above, which pack and unpack shards, relative to other collectives."""
    collective_latency: NonNegative = 0.0
    """Seconds of one call of a collective on top of the hops of its links: launch and synchronisation."""
    message_latency: NonNegative = 0.0
    """Seconds of a message between pipeline stages on top of that."""
    meanwhile_latency: NonNegative = 0.0
    """Seconds that it takes besides where ranks compute while they send: gloo's threads wait for a core."""
    context_latency: NonNegative = 0.0
    """Seconds of a layer's exchange of context parallelism, forward or backward, on top of that."""
    dispatch_latency: NonNegative = 0.0
    """Seconds of an exchange of experts on top of that."""
    ring_step: NonNegative = 0.0
    """Seconds of a tensor-parallel collective between nodes for each rank of its group."""
    scatters_messages: bool = False
    """Every tensor-parallel rank sends a part of what pipeline stages exchange; the receivers gather it."""
    waits_for_messages: bool = False
    """Ranks of an interleaved pipeline compute nothing while they send, as those of 1F1B."""
    reduction_bucket: NonNegative = 0.0
    """Bytes of parameters whose gradients one all-reduce of ZeRO 0 takes, while ZeRO 1 and above exchange
    all in one call; where it is 0, each layer is a call."""
    step_reductions: NonNegative = 0.0
    """All-reduces of a few bytes among all devices that end a step: of the gradient norm and the loss."""

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
    """Seconds that one layer's forward pass loses between its kernels, however large they are; backward
    loses twice as much."""
    graph_gaps: NonNegative = 0.0
    """Seconds between the kernels of one layer's forward pass that a CUDA graph of it takes away, however
    large the kernels are; twice as many of the backward pass."""
    backward: Positive = 1.0
    """Host time of a layer's backward pass, relative to its forward pass."""
    sharpness: Annotated[float, Field(ge=1)] = 8.0
    """Exponent of the p-norm that joins the device time of a pass of a layer and its launch floor: small
    where the device waits for the host in some parts of a layer and the host for the device in others."""
    tensor_parallel: Positive = 1.0
    """Factor of the host time of a layer for each doubling of tensor parallelism in a node."""
    sequence_parallel: Positive = 1.0
    """Factor for each doubling of tensor parallelism with sequence parallelism."""
    nodes: NonNegative = 1.0
    """Exponent of the islands (nodes, unless the device says otherwise) that a tensor-parallel group spans in
    the host time of a layer."""
    tensor_parallel_step: NonNegative = 0.0
    """Host seconds of a layer's forward pass for each tensor-parallel rank of a node, on top of that: where
    the host waits for every step of a ring."""
    unfused_softmax: Positive = 1.0
    """Host time of a layer whose softmax no kernel fuses (`softmax_batch`), relative to that of others."""
    split_backward: Positive = 1.0
    """Host time of a layer under a schedule that splits backward, relative to the others."""
    plain: Positive = 1.0
    """Host time of a layer whose parameters nothing wraps (`plain_whole`), relative to the others."""
    chained: Positive = 1.0
    """Host time of a layer that also runs in a chain of compiled layers, relative to the others."""
    shard: NonNegative = 0.0
    """Host seconds to cut what a layer exchanges into shards, for each of them, with ZeRO 1 and above."""
    step: NonNegative = 0.0
    """Host seconds of a step besides its passes: clipping, the optimizer's launches, the loss."""
    graph: bool = False
    """A step is one CUDA graph (Megatron-Core's `--cuda-graph-impl full_iteration`): the device waits for no
    launch of a layer, and experts take as many rows as they get without asking the host."""
    graphed: Fraction = 0.0
    """Share of the launches of a layer with experts that CUDA graphs of its parts take away.

    Its parts are attention, the router and what prepares the exchange (Megatron-Core's `--cuda-graph-scope
    attn moe_router moe_preprocess`)."""
    routing: NonNegative = 0.0
    """Host seconds of a layer's forward pass on top of that where it has experts: the host waits for the
    numbers of tokens that the routers chose, and launches kernels for experts one after the other."""


class OverlapConstants(Constants):
    """Communication that computation hides."""

    tensor_parallel: Fraction = 0.0
    """Share of tensor-parallel collectives that GEMMs of the same layer hide, chunk by chunk."""
    data_parallel: Fraction
    """Share of the data-parallel communication that can hide behind computation."""
    expert_parallel: Fraction = 0.0
    """Share of the exchanges of experts that passes of another microbatch hide (Megatron-Core's
    `--overlap-moe-expert-parallel-comm`)."""
    sharded: Fraction | None = None
    """Share that can hide with ZeRO 1 and above; as `data_parallel` when not given."""
    gathered: Fraction | None = None
    """Share that can hide with ZeRO 3, whose gatherings are asked for ahead; as `sharded` when not given."""
    sharpness: Annotated[float, Field(ge=1)] = 8.0
    """Exponent of the p-norm that joins what can hide and what it hides behind: large where only what is
    longer shows, small where both slow each other down."""


class ActivationConstants(Constants):
    """Tensors that a layer keeps for its backward pass."""

    norm_bytes: NonNegative = 0.0
    """Bytes of a layer's norms and residual sums for each element of the residual stream, besides inputs and
    outputs of norms in the number format of activations: copies in fp32."""
    unfused_norm_bytes: NonNegative = 0.0
    """Bytes on top of that where norms are chains of element-wise kernels (`norm_passes` above 1)."""
    score_bytes: NonNegative | None = None
    """Bytes of each attention score without flash attention; the softmax in the number format of activations,
    with dropout also its mask and output, when not given."""
    keeps_unrotated: bool = False
    """Queries and keys are kept before the rotation of their positions, too."""
    packs_attention: bool = False
    """The attention kernel keeps queries, keys and values packed in one more tensor (FlashAttention 1)."""
    fused_activation: bool = True
    """A gated MLP keeps its two inputs only; otherwise also the activated gate."""
    dropout: bool = False
    """Masks of attention and hidden dropout are kept for backward (GPT-2/3 recipes)."""
    regathers_sequence: bool = True
    """Backward gathers layer inputs again with sequence parallelism, instead of keeping them whole."""
    saves_alternate_products: bool = False
    """Selective recomputation of a dense layer, unless modules are named, saves its input, the output of
    attention and of every second GEMM: those of queries, values, the first of the MLP and its last
    (torchtitan's policy `op`)."""
    recompute_stops_early: bool = False
    """Recomputation ends with the last tensor that backward needs: a dense layer's last GEMM and the
    collective after it are not repeated."""
    expert_outputs: bool = True
    """Outputs of experts are kept for the gradients of their probabilities; otherwise these scale what goes
    into the last GEMM."""
    drops_rows: bool = False
    """Experts of a limited capacity take in the rows that they get, not as many as they could."""
    row_copies: NonNegative = 0.0
    """Copies of the rows of routed experts on their way, and of their gradients, that are there besides what
    a layer keeps while it goes backward."""
    fp8_inputs: bool = False
    """An fp8 recipe keeps the inputs of a layer's GEMMs in 8 bits, and none in the activations' format."""
    plain_delta_rule: bool = False
    """Linear attention runs in operators of its own in fp32, whose products of chunks backward keeps."""
    inner_gradients: bool = False
    """The gradients of an MLP's inner tensors and of its matrices, while its layer goes backward, count."""
    compiled: bool = False
    """Layers are compiled, but where backward is split. A compiled layer computes the activated gate again
    from its inputs, and the output of attention with its kernel. It keeps what its collectives gathered even
    where recomputation should drop it."""


class LossConstants(Constants):
    """Memory of the head and the loss."""

    logits_copies: NonNegative = 1.0
    """Copies of the logits in fp32 at the peak of the loss, besides logits and gradient."""
    split_logits_copies: NonNegative | None = None
    """Copies where tensor-parallel ranks split the vocabulary; as `logits_copies` when not given."""
    apart: bool = False
    """The peaks of the loss and of a recomputed layer count as two moments, of which the fuller decides."""
    chunked: bool = False
    """The head's GEMM and the loss are one operation that works on a chunk of tokens at a time
    (`costmodels.layers.shapes.loss_chunks`), and makes the gradients of tokens and matrix in forward."""
    gathers_logits: bool = False
    """Tensor-parallel ranks gather the logits, and each computes the whole loss."""


class AllocatorConstants(Constants):
    """Memory besides model states, activations and logits."""

    fragmentation: NonNegative
    """Extra share of the dynamic memory that the allocator reserves but cannot use: all but model states,
    permanent buffers and workspaces."""
    gathering_reserve: NonNegative = 0.0
    """Bytes for each parameter that ZeRO 1 and above gather that the allocator holds and cannot use: blocks
    that come and go with every layer leave holes in the heap of a CPU's process."""
    score_reserve: NonNegative = 0.0
    """Bytes for each attention score of one layer that the allocator holds and cannot use, without flash
    attention: blocks that large are not given out again in parts."""
    reduction_outputs: NonNegative = 0.0
    """Whole outputs of each layer that asynchronous reductions of sequence parallelism still hold while the
    host runs ahead of the device (`torch.Tensor.record_stream`)."""
    sequence_buffers: NonNegative = 0.0
    """Permanent buffers of sequence parallelism that each hold a whole input of a layer."""
    rotary_tables: bool = False
    """Every layer has a table of its own for the rotation of all positions, in fp32."""
    workspace_bytes: NonNegative = 0.0
    """Workspaces of libraries inside of the allocator: cuBLAS takes one for each stream and thread."""
    communicator_bytes: NonNegative = 0.0
    """Device memory of the buffers of one process group, outside of the allocator."""


class MemoryRangeConstants(Constants):
    """Half the width of the range of a step's tensors by kind of layout, as a share of them: the widest."""

    usual: NonNegative = 0.0
    """All others."""
    experts: NonNegative = 0.0
    ring: NonNegative = 0.0
    """Context parallelism in a ring."""
    split_backward: NonNegative = 0.0
    zbv: NonNegative = 0.0
    full_recompute: NonNegative = 0.0
    unusual_recompute: NonNegative = 0.0
    """Recomputation of blocks, or of several layers from one input."""
    further_tokens: NonNegative = 0.0
    """MTP modules."""
    linear: NonNegative = 0.0
    """Layers with linear attention."""
    capped: NonNegative = 0.0
    """Capped scores of attention."""
    windows: NonNegative = 0.0
    capacity: NonNegative = 0.0
    """Experts of a limited capacity."""
    adapters: NonNegative = 0.0
    formats: NonNegative = 0.0
    """Number formats other than those of 16 bits."""
    optimizers: NonNegative = 0.0
    """Optimizers whose states are smaller than weights."""
    offload: NonNegative = 0.0
    graphs: NonNegative = 0.0
    """CUDA graphs."""


class ShardingConstants(Constants):
    """Sharding and reduction of data parallelism."""

    eager_reduction_stage: CountOrZero = 2
    """Lowest ZeRO stage that reduces gradients after every microbatch and so keeps shards only."""
    single_reduction_stage: CountOrZero = 2
    """Lowest stage that does so where a step has a single microbatch, and nothing accumulates."""
    fully_sharded: bool = False
    """Data parallelism is FSDP2's: what is gathered and reduced is copied out of and into the buffers of the
    collectives, gradients are freed as they are reduced, and fp32 shards are what is offloaded. Otherwise
    parameters and gradients lie in the buffers of the collectives, which are cleared after every step."""
    live_parameters: NonNegative = 0.0
    """Parameters that ZeRO 3 holds gathered at a time, of all that there are; where it is 0, those of the
    layer at work, of the next one, and of embedding and head."""
    narrow_moments: bool = False
    """Adam's two moments are in 16 bits (Megatron-Core's `--use-precision-aware-optimizer`)."""
    ends_apart: bool = False
    """Embedding and head are gathered one by one, as layers are, and not both at a time."""
    plain_whole: bool = False
    """But for parameters that a rank computes with as a whole and updates itself, which FSDP2 does not wrap:
    they are cast to plain tensors, and gradients add up in the buffer of their reduction."""


class ExpertConstants(Constants):
    """Layers with experts."""

    load: Annotated[float, Field(ge=1)] | None = None
    """Tokens of the fullest expert-parallel rank over the mean, for which the others wait; that of natural
    routing (`costmodels.layers.expert_load`) if None."""
    grouped: bool = False
    """The GEMMs of all experts of a device are one kernel, not one each."""
    dispatch_rate: Positive = 1.0
    """Bandwidth of exchanges of experts relative to that of other collectives: kernels made for them come
    near the rate of the links."""
    copy_passes: Positive = 1.0
    """Traffic of putting copies of tokens in the order of the experts and back, relative to one read and one
    write on either side of their way: more where they are padded, scaled and cast on it."""
    fused: bool = False
    """Grouped kernels activate, scale and cast their rows themselves, and exchanges leave copies of tokens in
    the order of the experts: nothing passes through memory between them but what GEMMs read and write."""
    padding: NonNegative = 0.0
    """Rows that each GEMM of an expert computes for nothing: half a tile, on average."""
    fp8: bool = True
    """An fp8 recipe computes routed experts in 8 bits too."""
    buffers: Literal["", "deepep", "hybridep"] = ""
    """Library whose own buffers exchange tokens (`costmodels.memory.dispatch_buffers`); none if empty."""
    reach: Positive = 8.0
    """Ranks that HybridEP reaches through memory: those that fast links join."""
    dispatch_cores: CountOrZero = 0
    """Multiprocessors that an exchange of experts takes while passes of another microbatch hide it."""
    dispatches_by_node: bool = False
    """A token travels once to each node that has experts of its, not once to each expert."""


class MuonConstants(Constants):
    """The step of Muon, whose updates are of whole matrices."""

    layer_wise: bool = False
    """ZeRO shares out whole matrices: a rank updates its own ones, and gathers no momentum for them."""
    gathered: Positive | None = None
    """Bytes of an element of momentum on its way between ranks; those of the activations' format if None."""


class CheckpointConstants(Constants):
    """Memory of saving and reading checkpoints; None where nobody has looked how the engine does it."""

    host_copies: NonNegative | None = None
    """Copies in host memory of what a device writes, while training waits for the files."""
    resume_states: NonNegative | None = None
    """Copies of the optimizer's moments on the device, besides the moments, while a checkpoint is read."""
