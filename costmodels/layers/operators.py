"""Operators of one layer for one microbatch on one device: GEMMs, attention, bytes, collectives.

Shapes are those of Megatron-LM (Narayanan et al., arXiv:2104.04473, section 2.3; Korthikanti et al.,
arXiv:2205.05198, section 4). All functions take a `LayoutTable` of n rows; sizes are for each row.
"""

import math
from typing import NamedTuple

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.adapters import adapted_layers
from costmodels.layers.quantised import block_bytes, block_parameters, quantised_layers
from costmodels.layers.shapes import (
    attention_widths,
    compiles_experts,
    compressor_width,
    element_bytes,
    entry_width,
    key_value_width,
    norm_count,
    routed_rows,
    tokens,
    whole_heads_width,
)
from costmodels.spec.engine import Engine
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MlpKind
from costmodels.spec.table import ALL_GATHER, ALL_TO_ALL, RING, Floats, LayoutTable

BACKWARD_GEMM = 2.0
"""Backward work of a GEMM over its forward work: gradients of the input and of the weight."""

BACKWARD_FLASH = 2.5
"""Backward over forward work of flash attention: five GEMMs instead of two.

Dao, arXiv:2307.08691, section 3.1.2.
"""


class Gemm(NamedTuple):
    """`times` GEMMs of [m, k] by [k, n]."""

    m: Floats
    k: Floats
    n: Floats
    times: Floats
    wide: bool = False
    """True if an fp8 recipe leaves the operands in 16 bits."""
    cast: bool = False
    """True if the kernels before and after the GEMM write its operands in 8 bits."""


@dataclass(frozen=True)
class Operators:
    """Forward work of a layer, an embedding or a head. Arrays of shape [n]; bytes and FLOPs."""

    gemms: tuple[Gemm, ...]
    mlp_gemms: tuple[Gemm, ...]
    """GEMMs of the MLP or the experts among `gemms`, without their router."""
    shared_gemms: tuple[Gemm, ...]
    """GEMMs of shared experts among `gemms`; tokens travel to the routed experts during these."""
    last_gemms: tuple[Gemm, ...]
    """GEMMs among `gemms` whose outputs are not kept for backward: the last one of a dense layer."""
    seq: int
    """Tokens of a sequence in attention."""
    head_dim: int
    attention_flops: Floats
    """FLOPs of scores and weighted values for all positions, without the causal mask."""
    scores: Floats
    """Elements of the score matrices."""
    elementwise_forward: Floats
    """Bytes of element-wise work with perfect fusion."""
    elementwise_backward: Floats
    norm_bytes: Floats
    """The part of `elementwise_forward` for norms."""
    activation_bytes: Floats
    """The part of `elementwise_forward` for the activation function of the MLP."""
    attention_bytes: Floats
    """Bytes that attention keeps for backward: its input, queries, keys, values and output."""
    sequence_bytes: Floats
    """Bytes of a microbatch's activations in full width, which a tensor-parallel collective moves."""
    gathers_forward: Floats
    """Number of all-gathers and reduce-scatters of `sequence_bytes`; an all-reduce counts as two."""
    gathers_backward: Floats
    mlp_gathers: Floats
    """Collectives of the MLP or the shared experts among `gathers_forward`."""
    ring_bytes: Floats
    """Bytes of keys and values of one rank, which context parallelism passes around or gathers."""
    exchange_bytes: Floats
    """Bytes of queries, keys, values and output of one rank, where it exchanges tokens for heads."""
    gathered_bytes: Floats
    """Bytes of keys and values of the whole sequence, where they are gathered."""
    merge_bytes: Floats
    """Traffic of adding one rank's attention to that of the ranks before it, in fp32."""
    top_k: int
    """Experts of a token."""
    whole: bool
    """True if the whole layer, with experts, may be compiled."""
    routed_bytes: Floats
    """Bytes of tokens that one rank sends to experts on other ranks and receives back."""
    expert_gather_bytes: Floats
    """Bytes of tokens that are gathered, and of results that are reduce-scattered, among ranks that share
    experts."""
    alternate_gemms: tuple[Gemm, ...] = ()
    """GEMMs among `gemms` that selective recomputation repeats if it saves every second one: those of keys,
    of attention's output, the second one of a gated MLP, and those of routed experts
    (`ActivationConstants.saves_alternate_products`)."""
    adapter_gemms: tuple[Gemm, ...] = ()
    """GEMMs of low-rank adapters; all other GEMMs then have frozen weights without gradients."""
    is_frozen: bool = False
    """True if `gemms` have no weight gradients."""
    open_share: float = 1.0
    """Share of the groups of experts that a token may use."""
    limited: bool = False
    """True if experts have a capacity; only Megatron-Core's all-to-all dispatch has always supported that."""
    kernels: float = 1.0
    """Number of kernels that the host launches, over the number without adapters."""


def _attention_gemms(model: ModelSpec, table: LayoutTable) -> tuple[Gemm, ...]:
    t, tp, one = tokens(model, table), table.tensor_parallel, np.ones(len(table))
    h, mla, kind = model.hidden * one, model.latent_attention, model.attention_pattern[0]
    if kind == "none":
        return ()
    queries, values = attention_widths(model)
    output = Gemm(t, values / tp, h, one)
    if mla is None or kind == "linear":
        gate = values * (model.attention_gate and kind != "linear")
        return Gemm(t, h, (queries + gate) / tp + key_value_width(model, table), one), output
    # Every tensor-parallel rank computes the latents, of its own tokens with sequence parallelism.
    own = t / np.where(table.sequence_parallel, tp, 1)
    latent = mla.kv_lora_rank * one
    down = Gemm(own, h, latent + mla.qk_rope_head_dim, one)
    up: tuple[Gemm, ...] = (Gemm(t, latent, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp, one),)
    rank = (mla.q_lora_rank or model.hidden) * one
    chosen: tuple[Gemm, ...] = ()
    compressed, indexer = model.compressed_attention, model.indexer
    if indexer is not None and (share := indexer.share_in(kind, compressed)):
        # All tensor-parallel ranks choose the same positions. Keys of entries are made with the entries.
        width = indexer.heads * indexer.head_dim
        weights = indexer.heads + indexer.head_dim * (compressed is None)
        chosen = (Gemm(t, rank, width * one, share * one), Gemm(t, h, weights * one, share * one))
    if compressed is not None:
        # Latents are keys and values as they are; each rank compresses its own tokens for all.
        up = (Gemm(own, h, compressor_width(model) * one, one),) if compressor_width(model) else ()
        groups, inner = compressed.o_groups / tp, compressed.o_lora_rank * one
        chosen += (Gemm(t, values / compressed.o_groups * one, inner, groups),)
        output = Gemm(t, groups * inner, h, one)
    if not mla.q_lora_rank:
        return Gemm(t, h, queries / tp, one), down, *up, *chosen, output
    return Gemm(own, h, rank, one), Gemm(t, rank, queries / tp, one), down, *up, *chosen, output


def _core_flops(model: ModelSpec, table: LayoutTable) -> Floats:
    """FLOPs of scores and weighted values for twice the pairs of tokens that attention computes.

    Work of linear attention between its projections, and of an indexer, is included.
    """
    t, tp, kind = tokens(model, table), table.tensor_parallel, model.attention_pattern[0]
    if kind == "linear":
        assert model.linear_attention is not None
        result: Floats = 2 * t * model.linear_attention.flops_per_token() / tp
        return result
    pairs = t * model.seq * model.score_share(kind)
    found: Floats = 2 * pairs * sum(attention_widths(model)) / tp
    return found + 2 * t * model.seq * model.index_width(kind)


def _mlp_gemms(
    model: ModelSpec, m: Floats, width: Floats, count: Floats, wide: bool = False, cast: bool = False
) -> tuple[Gemm, ...]:
    h = np.full_like(width, model.hidden)
    return Gemm(m, h, (1 + model.gated) * width, count, wide, cast), Gemm(m, width, h, count, wide, cast)


class _Mlp(NamedTuple):
    """Forward work of a layer's MLP or experts on one device; arrays of shape [n]."""

    gemms: tuple[Gemm, ...]
    between: Floats
    """Elements that element-wise work between the GEMMs reads and writes."""
    activated: Floats
    """Elements of the activation function's input."""
    gathers: float
    """Number of tensor-parallel all-gathers and reduce-scatters around the matrices."""
    joins: Floats
    """Collectives that gather the layer's output after each rank routed its own tokens."""
    routed_bytes: Floats
    gather_bytes: Floats
    """Bytes gathered among ranks that share experts."""
    mlp_gemms: tuple[Gemm, ...] = ()
    """GEMMs among `gemms` without the router's."""
    shared_gemms: tuple[Gemm, ...] = ()
    last_gemms: tuple[Gemm, ...] = ()


def _mlp(model: ModelSpec, engine: Engine, table: LayoutTable, mlp: MlpKind) -> _Mlp:
    """Forward work of an MLP of kind `mlp`."""
    if mlp == "experts":
        return _experts(model, engine, table)
    one = np.ones(len(table))
    zero = 0.0 * one
    if mlp == "none":
        return _Mlp((), zero, zero, 0.0, zero, zero, zero)
    t, width = tokens(model, table), model.ffn / table.tensor_parallel
    gemms = _mlp_gemms(model, t, width, one)
    activated = t * (1 + model.gated) * model.ffn / table.tensor_parallel
    return _Mlp(gemms, activated, activated, 2.0, zero, zero, zero, gemms, (), gemms[-1:])


def _experts(model: ModelSpec, engine: Engine, table: LayoutTable) -> _Mlp:
    """Forward work of a layer's experts and shared experts (arXiv:2504.14960, section 3).

    Each rank routes its own 1/tp of the tokens. Without sequence parallelism it takes that slice first and
    gathers the layer's output at the end. With ep > 1 an all-to-all sends a copy of a token to each of its
    experts. With etp > 1 the ranks that share these experts gather the received tokens. With ep = 1 they
    gather the tokens once, and make the copies after that. Shared experts are split over tp as a dense MLP
    is.
    """
    e, one, h = element_bytes(table.precision), np.ones(len(table)), model.hidden
    t, tp = tokens(model, table), table.tensor_parallel
    ep, etp = table.expert_parallel, table.expert_tensor_parallel
    rows, apart = routed_rows(model, table, engine.experts.load), ep > 1
    router = Gemm(t / tp, h * one, model.experts * one, one, wide=True)
    wide, fused = not engine.experts.fp8, engine.experts.fused
    routed = _mlp_gemms(
        model, rows * ep / model.experts, model.expert_ffn / etp, model.experts / ep, wide, fused
    )
    shared: tuple[Gemm, ...] = ()
    if model.shared_expert_ffn:
        shared = _mlp_gemms(model, t, model.shared_expert_ffn / tp, one)
    shared_inner = t * model.shared_expert_ffn / tp
    inner = rows * model.expert_ffn / etp
    activated = (inner + shared_inner) * (1 + model.gated)
    # Copies of tokens are put in the order of the experts and back, before and after the all-to-all.
    copied = engine.experts.copy_passes * 2 * h * (rows + apart * rows / etp)
    return _Mlp(
        gemms=(router, *routed, *shared),
        between=shared_inner * (1 + model.gated) if fused else activated + copied,
        activated=activated,
        gathers=2.0 * bool(shared),
        joins=np.where(table.sequence_parallel, 0.0, 1.0),
        routed_bytes=np.where(apart, e * h * rows / etp, 0.0),
        gather_bytes=np.where(etp > 1, e * h * np.where(apart, rows, t * etp / tp), 0.0),
        mlp_gemms=(*routed, *shared),
        shared_gemms=shared,
    )


def _alternate_gemms(
    model: ModelSpec, table: LayoutTable, mlp: MlpKind, attention: tuple[Gemm, ...], part: _Mlp
) -> tuple[Gemm, ...]:
    """GEMMs that are recomputed if every second one is saved, and the router and experts always."""
    if mlp == "none" or model.attention_pattern[0] in ("none", "linear"):
        return ()
    t, one, h = tokens(model, table), np.ones(len(table)), model.hidden * np.ones(len(table))
    again: tuple[Gemm, ...] = (Gemm(t, h, key_value_width(model, table) / 2, one), attention[-1])
    count = 4
    if model.latent_attention is not None:
        again, count = attention[1::2], len(attention)
    width = (model.ffn if mlp == "dense" else model.shared_expert_ffn) / table.tensor_parallel
    if width.any():
        up, down = Gemm(t, h, width, one), Gemm(t, width, h, one)
        again += ((up,) * model.gated) if count % 2 == 0 else (up, down)
    return again if mlp == "dense" else (*again, *_routed_gemms(part))


def _routed_gemms(part: _Mlp) -> tuple[Gemm, ...]:
    """The router's GEMM and those of routed experts."""
    return part.gemms[: len(part.gemms) - len(part.shared_gemms)]


class _ContextBytes(NamedTuple):
    """Bytes that each form of context parallelism moves for one layer, [n] each; 0 where another form is
    used."""

    ring: Floats
    exchanged: Floats
    gathered: Floats
    merged: Floats


def _context_bytes(model: ModelSpec, table: LayoutTable) -> _ContextBytes:
    """Bytes that context parallelism moves for one layer, and bytes of adding a ring's partial results."""
    e, t, tp = element_bytes(table.precision), tokens(model, table), table.tensor_parallel
    cp, kv = table.context_parallel, key_value_width(model, table)
    queries, values = attention_widths(model)
    forms = table.context_parallel_form * (cp > 1)
    exchanged = whole_heads_width(model, table) + (queries + values) / tp
    return _ContextBytes(
        ring=np.where(cp > 1, e * t * kv, 0.0),
        exchanged=np.where(forms == ALL_TO_ALL, e * t * exchanged, 0.0),
        gathered=np.where((cp > 1) & (forms == ALL_GATHER), e * t * kv * cp, 0.0),
        merged=np.where(forms == RING, (e + 8) * t * values / tp, 0.0),
    )


def _gathers(model: ModelSpec, engine: Engine, table: LayoutTable, mlp: _Mlp) -> tuple[Floats, Floats]:
    """Numbers of all-gathers and reduce-scatters of a layer's sequence, forward and backward, [n] each."""
    attends, sp = model.attention_pattern[0] != "none", table.sequence_parallel
    # Latent attention gathers what is compressed; without sequence parallelism that costs backward only.
    entry = entry_width(model) / model.hidden
    forward = attends * np.where(sp, 1.0 + entry, 2.0) + mlp.gathers + mlp.joins
    backward = attends * np.where(sp, 1.0 + entry, 2.0 * entry) + mlp.gathers + mlp.joins
    # Korthikanti et al., section 4.2.2: layer inputs, kept split, are gathered once more.
    return forward, backward * np.where(sp & engine.activations.regathers_sequence, 1.5, 1.0)


def layer(model: ModelSpec, engine: Engine, table: LayoutTable, mlp: MlpKind) -> Operators:
    """Forward work of one layer with the first layer's kind of attention and an MLP of kind `mlp`.

    Element-wise traffic of a layer in forward is 6 tensors of width `hidden` (two norms, two residual
    additions, fused), and a read and a write of tensors between GEMMs. Backward has half as much again.
    """
    e, one = element_bytes(table.precision), np.ones(len(table))
    t, tp, sp = tokens(model, table), table.tensor_parallel, table.sequence_parallel
    h = model.hidden
    queries, values = attention_widths(model)
    kv = key_value_width(model, table)
    attends = model.attention_pattern[0] != "none"
    attention = _attention_gemms(model, table)
    if model.other_layer_parameters:
        attention = (Gemm(t, h * one, model.other_layer_parameters / h / tp, one), *attention)
    part = _mlp(model, engine, table, mlp)
    own = t / np.where(sp, tp, 1)
    between = t * (queries / tp + kv) + part.between + attends * t * h / tp + own * compressor_width(model)
    whole = e * own * h
    # A hyper-connection before and after each block reads all residuals twice and writes them once, fused.
    mixed = 6 * model.residual_streams * (model.residual_streams > 1)
    norms = 2 * norm_count(model, mlp) * engine.elementwise.norm_passes
    gathers_forward, gathers_backward = _gathers(model, engine, table, part)
    context = _context_bytes(model, table)
    adapters, adding, adding_back, kernels = _adapters(model, table, mlp)
    return Operators(
        gemms=attention + part.gemms,
        mlp_gemms=part.mlp_gemms,
        shared_gemms=part.shared_gemms,
        last_gemms=part.last_gemms,
        seq=model.seq,
        head_dim=model.head_dim,
        attention_flops=_core_flops(model, table),
        scores=t * model.seq * model.heads / tp,
        elementwise_forward=(2 + mixed + norms) * whole + 2 * e * between + adding,
        elementwise_backward=(3 + 1.5 * (mixed + norms)) * whole + 3 * e * between + adding_back,
        norm_bytes=norms * whole,
        activation_bytes=2 * e * part.activated,
        attention_bytes=attends * e * t * (h + (queries + values) / tp + kv),
        sequence_bytes=e * t * h,
        gathers_forward=gathers_forward,
        gathers_backward=gathers_backward,
        mlp_gathers=part.gathers * one,
        ring_bytes=context.ring,
        exchange_bytes=context.exchanged,
        gathered_bytes=context.gathered,
        merge_bytes=context.merged,
        top_k=model.top_k,
        open_share=model.router.top_groups / model.router.groups,
        limited=model.router.capacity_factor > 0,
        whole=compiles_experts(model),
        routed_bytes=part.routed_bytes,
        expert_gather_bytes=part.gather_bytes,
        alternate_gemms=_alternate_gemms(model, table, mlp, attention, part),
        adapter_gemms=adapters,
        is_frozen=model.lora is not None,
        kernels=kernels + _attention_kernels(model, engine) / LAYER_KERNELS,
    )


LAYER_KERNELS, ADAPTER_KERNELS, MATRIX_KERNELS = 20, 3, 1
"""Approximate numbers of kernels in forward: of a layer, of an adapter (two GEMMs and a scaled addition), and
of dequantising a 4-bit matrix."""

LATENT_KERNELS, LINEAR_KERNELS, SCAN_KERNELS = 12, 16, 3
"""Numbers of additional kernels: of latent attention (two or three GEMMs, two norms, and splits, rotations
and concatenations of heads); of linear attention (a convolution, gates, norms, and GEMMs of all chunks); and
of each chunk where plain operators pass the state on (`runtime.model.delta_rule.scan`)."""


def _attention_kernels(model: ModelSpec, engine: Engine) -> float:
    """Kernels of the first layer's attention beyond those of plain attention."""
    kind = model.attention_pattern[0]
    if kind == "linear":
        assert model.linear_attention is not None
        chunks = math.ceil(model.seq / model.linear_attention.chunk)
        return LINEAR_KERNELS + SCAN_KERNELS * chunks * engine.activations.plain_delta_rule
    return LATENT_KERNELS if model.latent_attention is not None and kind != "none" else 0.0


def _adapters(
    model: ModelSpec, table: LayoutTable, mlp: MlpKind
) -> tuple[tuple[Gemm, ...], Floats, Floats, float]:
    """Costs of a layer's adapters: GEMMs, bytes of additions in forward and backward, and `kernels`.

    A 4-bit base is dequantised to the format of GEMMs for each GEMM: one in forward and one for the input
    gradient.
    """
    t, one, adapted = tokens(model, table), np.ones(len(table)), adapted_layers(model, mlp)
    if model.lora is None or not adapted:
        return (), 0 * one, 0 * one, 1.0
    rank, gemms, forward, backward = model.lora.rank * one, [], 0 * one, 0 * one
    e, tp = element_bytes(table.precision), table.tensor_parallel
    for layer in adapted:
        inputs, outputs = layer.sides(tp.astype(np.float64))
        gemms += [Gemm(t, inputs * one, rank, one), Gemm(t, rank, outputs * one, one)]
        # The output of an adapter is scaled and added; so are gradients of the output, and of the input.
        forward = forward + 3 * e * t * outputs
        backward = backward + e * t * (2 * outputs + 3 * inputs)
    launches = ADAPTER_KERNELS * len(adapted)
    if packed := quantised_layers(model, mlp):
        share = tp.astype(np.float64)
        turned_back = block_bytes(model, mlp, share) + e * block_parameters(model, mlp, share)
        forward, backward = forward + turned_back, backward + turned_back
        launches += MATRIX_KERNELS * len(packed)
    return tuple(gemms), forward, backward, 1 + launches / LAYER_KERNELS


def embedding(model: ModelSpec, table: LayoutTable) -> Operators:
    """Work of looking up tokens: each rank has a slice of the vocabulary, followed by a sum
    (arXiv:1909.08053, section 3)."""
    zero = np.zeros(len(table))
    sp = table.sequence_parallel
    whole = element_bytes(table.precision) * tokens(model, table) * model.hidden
    return Operators(
        gemms=(),
        mlp_gemms=(),
        shared_gemms=(),
        last_gemms=(),
        seq=model.seq,
        head_dim=model.head_dim,
        attention_flops=zero,
        scores=zero,
        elementwise_forward=2 * whole,
        elementwise_backward=2 * whole * (model.lora is None),
        norm_bytes=zero,
        activation_bytes=zero,
        attention_bytes=zero,
        sequence_bytes=whole,
        gathers_forward=np.where(sp, 1.0, 2.0),
        gathers_backward=np.where(sp, 1.0, 0.0),
        mlp_gathers=zero,
        ring_bytes=zero,
        exchange_bytes=zero,
        gathered_bytes=zero,
        merge_bytes=zero,
        top_k=0,
        whole=True,
        routed_bytes=zero,
        expert_gather_bytes=zero,
    )


def head(model: ModelSpec, engine: Engine, padded_vocab: Floats, table: LayoutTable) -> Operators:
    """Final norm, output matrix and cross entropy over a vocabulary that tensor parallelism splits.

    The engine's `loss_bytes` is the traffic of the loss for each logit, a third of it in backward. Fused
    kernels read and write a logit a few times, chains of element-wise kernels many times. Gathering the
    logits takes vocabulary / hidden times as long as gathering a layer's input.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp, sp, zero = table.tensor_parallel, table.sequence_parallel, np.zeros(len(table))
    logits = t * padded_vocab / (1 if engine.loss.gathers_logits else tp)
    norm = engine.elementwise.norm_passes * e * t * model.hidden / np.where(sp, tp, 1)
    gathered = engine.loss.gathers_logits * padded_vocab / model.hidden
    return Operators(
        gemms=(Gemm(t, zero + model.hidden, padded_vocab / tp, zero + 1),),
        mlp_gemms=(),
        shared_gemms=(),
        last_gemms=(),
        seq=model.seq,
        head_dim=model.head_dim,
        attention_flops=zero,
        scores=zero,
        elementwise_forward=2 * norm + engine.elementwise.loss_bytes * logits * 2 / 3,
        elementwise_backward=3 * norm + engine.elementwise.loss_bytes * logits / 3,
        norm_bytes=zero,
        activation_bytes=zero,
        attention_bytes=zero,
        sequence_bytes=e * t * model.hidden,
        gathers_forward=np.where(sp, 1.0, 0.0) + gathered,
        gathers_backward=np.where(sp, 1.0, 2.0),
        mlp_gathers=zero,
        ring_bytes=zero,
        exchange_bytes=zero,
        gathered_bytes=zero,
        merge_bytes=zero,
        top_k=0,
        whole=True,
        routed_bytes=zero,
        expert_gather_bytes=zero,
        is_frozen=model.lora is not None,
    )


def padded_vocabulary(model: ModelSpec, table: LayoutTable) -> Floats:
    """Rows of the stored vocabulary, `ModelSpec.padded_vocab` of each row's tensor parallelism."""
    degrees, row = np.unique(table.tensor_parallel, return_inverse=True)
    return np.array([model.padded_vocab(int(degree)) for degree in degrees], dtype=np.float64)[row]
