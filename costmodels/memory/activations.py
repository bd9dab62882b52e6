"""Bytes that one layer keeps of one microbatch from forward to backward, tensor by tensor.

The count follows Korthikanti et al. (arXiv:2205.05198, sections 4 and 5), extended to grouped queries, gated
MLPs, flash attention, experts, context parallelism and 32-bit activations.
"""

from typing import NamedTuple

import numpy as np

from costmodels.layers.adapters import adapted_layers
from costmodels.layers.shapes import (
    attention_widths,
    casts_weights_once,
    compressor_width,
    element_bytes,
    even_rows,
    filled_share,
    key_value_width,
    norm_count,
    peak_routed_rows,
    tokens,
    whole_expert_rows,
    whole_heads_width,
)
from costmodels.spec.engine import Engine
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MlpKind
from costmodels.spec.table import FULL, RING, SELECTIVE, Bools, Floats, LayoutTable, by_context_form, code_of

CORE_ATTENTION = code_of("recompute_modules", ("core_attention",))
"""Default modules of selective recomputation, as bits."""

CHOICE = 12.0
"""Bytes of a token's choice of one expert: its place in 64 bits, and its weight in 32."""


NARROW_PRODUCTS = ("fp8", "mxfp8")
"""Number formats whose GEMMs have 8-bit operands."""


class KeptInputs(NamedTuple):
    """Inputs of matrices that backward needs: of trained matrices, and of matrices with adapters."""

    heads: bool
    """True where the inputs are queries, keys and values."""
    up: bool
    down: bool
    adapted_up: int = 0
    """Number of input matrices of the MLP that have adapters."""


def kept_inputs(model: ModelSpec, mlp: MlpKind) -> KeptInputs:
    """The inputs that a layer keeps for weight gradients; a frozen matrix needs none."""
    if model.lora is None:
        return KeptInputs(True, True, True)
    names = {layer.module.rpartition(".")[2] for layer in adapted_layers(model, mlp)}
    heads = not names.isdisjoint(("query", "key", "value", "latent", "key_value"))
    ups = len(names & {"up", "gate"})
    return KeptInputs(heads, ups > 0, "down" in names, ups)


class _Layer(NamedTuple):
    """A layer with the first layer's kind of attention, and the quantities that its tensors depend on; [n]
    each."""

    model: ModelSpec
    engine: Engine
    table: LayoutTable
    mlp: MlpKind
    element: float
    """Bytes of an element."""
    tokens: Floats
    part: Floats
    """Ranks that sequence parallelism splits the tokens over."""
    compiled: Bools
    eager: Bools
    """True for layers that run without compilation although the engine compiles others, as with split
    backward."""
    keeps: KeptInputs

    @property
    def moe(self) -> bool:
        """True where the MLP of the layer is routed experts."""
        return self.mlp == "experts"

    @property
    def scores(self) -> bool:
        """True where attention computes scores of pairs of tokens."""
        return self.model.attention_pattern[0] not in ("linear", "none")

    @property
    def dropout(self) -> bool:
        """True where dropout masks are kept; models with RMS norms, which came later, have none."""
        return self.engine.activations.dropout and self.model.norm == "layernorm"

    @property
    def gathered(self) -> Floats | int:
        """Number of ranks over which a kept input of a matrix is split."""
        return self.part if self.engine.activations.regathers_sequence else 1

    @property
    def residual(self) -> Floats:
        """Elements of the residual stream on one rank."""
        result: Floats = self.tokens * self.model.hidden / self.part
        return result

    @property
    def wider(self) -> Floats:
        """Bytes of an element beyond those of the format; norms whose weights are stored minus one keep
        inputs in fp32."""
        result: Floats = (4.0 - self.element) * self.model.norm_from_one * self.eager.astype(np.float64)
        return result

    @property
    def rings(self) -> Bools:
        """Rows whose attention passes keys and values around a ring."""
        result: Bools = (self.table.context_parallel > 1) & (self.table.context_parallel_form == RING)
        return result


class _Parts(NamedTuple):
    """Bytes that a layer without recomputation keeps of one microbatch; [n] each."""

    norms: Floats
    attention_input: Floats
    attention: Floats
    """Bytes of queries, keys, values and the output of attention."""
    core: Floats
    """Bytes of scores, or of the softmax sums that flash attention keeps instead."""
    copies: Floats
    """Bytes of tensors of context parallelism."""
    mlp_input: Floats
    width: Floats
    """Number of elements between the matrices of the MLP or the experts."""
    inner: Floats
    """Bytes kept for each element between the matrices."""
    activated: Floats
    """The part of `inner` for the activation function's output."""
    gate: Floats | float
    """Bytes of the shared experts' output before their gate."""
    routing: Floats
    """Bytes of the copies of tokens that experts take in, and of the router's scores."""
    summed: Floats | float
    """Bytes of the outputs of experts that are summed up."""
    rows: Floats | float
    """Bytes of the copies of tokens that the rank's experts process."""
    casts: Floats | float = 0.0
    """Bytes of 8-bit copies of weights."""
    adapters: Floats | float = 0.0
    """Bytes of the inputs of adapters' second matrices."""

    @property
    def activations(self) -> Floats:
        """Bytes between the matrices of the MLP."""
        return self.inner * self.width + self.gate

    @property
    def layer_inputs(self) -> Floats:
        """Bytes of the inputs of attention and of the MLP."""
        return self.attention_input + self.mlp_input

    @property
    def whole(self) -> Floats:
        """The sum of all bytes."""
        attention = self.norms + self.layer_inputs + self.attention + self.copies + self.core
        return attention + self.activations + self.routing + self.summed + self.casts + self.adapters


def activation_bytes(
    model: ModelSpec, engine: Engine, table: LayoutTable, mlp: MlpKind
) -> tuple[Floats, Floats, Floats]:
    """Bytes of one layer and microbatch: kept on the device, recomputed, and kept on the host.

    For a GPT layer of 16-bit activations with dropout this is s b h (10 + 24/t + 5 a s / (h t)), with
    sequence parallelism s b h / t (34 + 5 a s / h) (arXiv:2205.05198, equations 2 and 4); selective
    recomputation drops the scores (equation 6), full recomputation keeps the input of the layer only.
    """
    compiled = engine.activations.compiled & ~table.runs(*SPLIT_BACKWARD)
    layer = _Layer(
        model=model,
        engine=engine,
        table=table,
        mlp=mlp,
        element=element_bytes(table.precision),
        tokens=tokens(model, table),
        part=np.where(table.sequence_parallel, table.tensor_parallel, 1),
        compiled=compiled,
        eager=engine.activations.compiled & ~compiled,
        keeps=kept_inputs(model, mlp),
    )
    parts = _in_eight_bits(layer, _compiled_casts(layer, _parts(layer)))
    kept = _kept(layer, parts)
    working = _working(layer, parts, kept)
    if not table.offload_activations.any():
        return kept, working, np.zeros(len(table))
    # The input of attention, its queries, keys and values, and its output.
    moved = parts.attention + parts.copies * ~table.recomputes("core_attention")
    moved = moved + parts.attention_input * ~table.recomputes("norm")
    moved = np.where(table.offload_activations & (table.recompute != FULL), moved, 0.0)
    return kept - moved, working, moved


def _parts(layer: _Layer) -> _Parts:
    """Bytes of a layer's tensors with activations in the usual format."""
    model, e, t, tp = layer.model, layer.element, layer.tokens, layer.table.tensor_parallel
    attention_input, attention = _attention(layer)
    apart = ~layer.compiled & (model.gated and not layer.engine.activations.fused_activation)
    activated: Floats = e * (int(layer.keeps.down) + apart) * np.ones(len(layer.table))
    inner: Floats = e * (1 + model.gated) + activated
    if model.activation == "clamped_silu":
        # Both halves clamped, and the sigmoid of one.
        inner = inner + 3 * e * layer.eager
    mlp_input, width, routing, summed, rows = _experts(layer) if layer.moe else _dense(layer)
    return _Parts(
        norms=_norms(layer),
        attention_input=attention_input,
        attention=attention,
        core=_core(layer),
        copies=_context_copies(model, layer.table),
        mlp_input=mlp_input,
        width=width,
        inner=inner,
        activated=activated,
        gate=e * t * model.hidden / tp if layer.moe and model.shared_expert_gate else 0.0,
        routing=routing,
        summed=summed,
        rows=rows,
        adapters=0.0
        if model.lora is None
        else e * t * model.lora.rank * len(adapted_layers(model, layer.mlp)),
    )


def _norms(layer: _Layer) -> Floats:
    """Bytes of the inputs of a layer's norms, of the norms' outputs, and of dropout masks."""
    model, constants, e, residual = layer.model, layer.engine.activations, layer.element, layer.residual
    unfused = constants.unfused_norm_bytes * (layer.engine.elementwise.norm_passes > 1)
    norms = (2 * e + 2 * layer.dropout + constants.norm_bytes + unfused) * residual
    norms = norms * norm_count(model, layer.mlp) / 2
    norms = norms + layer.wider * residual * norm_count(model, layer.mlp)
    if model.norm_place == "around":
        # The compiler sums what attention adds up again.
        norms = norms - layer.compiled * e * residual
    if model.parallel_residual:
        # Both norms have one input.
        norms = norms - e * residual
    # Inputs of the hyper-connections' mixing, before attention and before the MLP.
    streams = model.residual_streams
    return norms + 2 * e * streams * residual * (streams > 1)


def _attention(layer: _Layer) -> tuple[Floats, Floats]:
    """Bytes of the input of attention, and of its queries, keys, values and output."""
    model, engine, table = layer.model, layer.engine, layer.table
    e, t, tp, kind = layer.element, layer.tokens, table.tensor_parallel, model.attention_pattern[0]
    queries, values = attention_widths(model)
    inputs: Floats = layer.keeps.heads * e * t * model.hidden / layer.gathered
    kept = e * t * ((queries + values) / tp + key_value_width(model, table))
    if model.attention_gate and layer.scores:
        kept = kept + 2 * e * t * values / tp
    # Queries and keys before their norms too, and before their positions.
    before = int(model.qk_norm) + int(engine.activations.keeps_unrotated and model.position == "rope")
    if kind == "linear":
        # The input of the convolution, and the output before its norm and gate.
        assert model.linear_attention is not None
        kept = kept + e * t * (model.linear_attention.conv_size + values) / tp
        if engine.activations.plain_delta_rule:
            # The normalised output and its gate in fp32, and their product.
            kept = kept + layer.eager * (8 + e) * t * values / tp
    elif before:
        of_each = before * e + model.qk_norm * layer.wider
        kept = kept + of_each * t * (queries / tp + key_value_width(model, table) / 2)
    if engine.activations.packs_attention and engine.attention.flash:
        kept = kept + e * t * (queries / tp + key_value_width(model, table))
    if kind == "none":
        inputs = inputs * 0.0
    if model.latent_attention is not None and layer.scores:
        # Ranks compress their own tokens, and gather what is compressed and normalised.
        mla = model.latent_attention
        compressed = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        made = compressed * (1 / layer.part + 1 / layer.gathered) + compressor_width(model) / layer.part
        kept = kept + e * t * made
        inputs = e * t * model.hidden / (layer.part if mla.q_lora_rank else layer.gathered)
        if engine.activations.joins_latents and not mla.q_lora_rank:
            # Next to the copy, the input of the compression is kept.
            inputs = inputs + e * t * model.hidden / layer.part * (tp > 1)
    return inputs, kept


def _core(layer: _Layer) -> Floats:
    """Bytes of scores, or of the softmax sums of flash attention."""
    model, engine, table = layer.model, layer.engine, layer.table
    e, t, tp = layer.element, layer.tokens, table.tensor_parallel
    if model.attention_pattern[0] == "linear" and engine.activations.plain_delta_rule:
        return _delta_rule_bytes(model, table, layer.compiled)
    if not layer.scores:
        return np.zeros(len(table))
    if engine.attention.flash:
        sums: Floats = 4 * t * model.heads / tp
        return sums
    score = engine.activations.score_bytes
    if score is None:
        score = e + layer.dropout * (e + 1)
    result: Floats = t * model.seq * model.heads / tp * score
    return result


def _dense(layer: _Layer) -> tuple[Floats, Floats, Floats, float, float]:
    """Bytes of the input of a dense MLP and the elements between its matrices; zeros where there is none."""
    model, is_there = layer.model, layer.mlp == "dense"
    inputs = layer.keeps.up * layer.element * layer.tokens * model.hidden / layer.gathered * is_there
    width = layer.tokens * model.ffn / layer.table.tensor_parallel * is_there
    return inputs, width, np.zeros(len(layer.table)), 0.0, 0.0


def _experts(layer: _Layer) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Bytes of the router's input, elements between matrices, bytes of routing and of summed outputs, and
    copies of tokens."""
    model, constants, table = layer.model, layer.engine.activations, layer.table
    e, t, tp, h = layer.element, layer.tokens, table.tensor_parallel, model.hidden
    rows = peak_routed_rows(model, table)
    if constants.drops_rows:
        rows = rows * filled_share(model, table)
    etp = table.expert_tensor_parallel
    width = rows * model.expert_ffn / etp + t * model.shared_expert_ffn / tp
    # The router's input, and that of the shared experts where they gather it and keep it.
    own = (tp > 1) & (np.asarray(layer.gathered) == 1) & (model.shared_expert_ffn > 0)
    inputs = e * t * h * (1 / tp + layer.keeps.up * own)
    # The rows that experts take in, those of the rank's own tokens that are summed up, and the router's fp32
    # scores.
    own_rows = np.minimum(rows, even_rows(model, table)) / np.where(table.expert_parallel > 1, etp, 1)
    routing = e * h * rows * (model.lora is None) + 4 * t * model.experts / tp
    return inputs, width, routing, e * h * own_rows * constants.expert_outputs, rows


def _compiled_casts(layer: _Layer, parts: _Parts) -> _Parts:
    """The tensors of compiled layers whose GEMMs have 8-bit operands.

    The compiler recomputes an operand from the tensors before its cast: the activated half of the MLP, and
    normalised inputs. Gathered inputs are kept in 8 bits. For split matrices, the 8-bit transposes of weights
    are kept, except those of queries and keys.
    """
    model, compiled, tp = layer.model, layer.compiled, layer.table.tensor_parallel
    if layer.moe or layer.table.precision not in NARROW_PRODUCTS or not compiled.any():
        return parts
    narrow = np.where(layer.table.sequence_parallel & (tp > 1), 0.5, 0.0)
    made_again = compiled * layer.element * int(layer.keeps.down)
    values = attention_widths(model)[1]
    elements = model.hidden * (values + (2 + model.gated) * model.ffn * (layer.mlp == "dense"))
    # Weights that are cast once a step are kept by nobody else.
    casts = compiled & (tp > 1) & ~casts_weights_once(layer.engine, layer.table)
    return parts._replace(
        attention_input=np.where(compiled, narrow * parts.attention_input, parts.attention_input),
        mlp_input=np.where(compiled, narrow * parts.mlp_input, parts.mlp_input),
        inner=parts.inner - made_again,
        activated=parts.activated - made_again,
        casts=casts * elements / tp,
    )


def _in_eight_bits(layer: _Layer, parts: _Parts) -> _Parts:
    """The tensors of engines that keep inputs of GEMMs in 8 bits.

    Attention also keeps its own output; a router reads its input in 16 bits.
    """
    model, e, tp = layer.model, layer.element, layer.table.tensor_parallel
    keeps_narrow = layer.engine.activations.fp8_inputs and model.lora is None
    if not keeps_narrow or layer.table.precision not in NARROW_PRODUCTS:
        return parts
    narrower, values = e - 1, attention_widths(model)[1]
    mlp_input, routing = parts.mlp_input, parts.routing
    if layer.moe:
        routing = routing - narrower * model.hidden * parts.rows
    else:
        mlp_input = mlp_input - narrower * mlp_input / e
    return parts._replace(
        attention=parts.attention + layer.tokens * values / tp * layer.scores,
        attention_input=parts.attention_input - narrower * parts.attention_input / e,
        mlp_input=mlp_input,
        inner=parts.inner - narrower,
        activated=parts.activated - narrower,
        routing=routing,
    )


def _kept(layer: _Layer, parts: _Parts) -> Floats:
    """Bytes kept from forward to backward with each row's recomputation."""
    model, table, e, t = layer.model, layer.table, layer.element, layer.tokens
    tp, whole = table.tensor_parallel, parts.whole
    values = attention_widths(model)[1]
    # Attention that is not compiled keeps its output: in a ring, with offloading, and with capped scores.
    compiled = layer.compiled & ~layer.rings & ~table.offload_activations
    compiled = compiled * bool(layer.scores and not model.attention_softcap)
    output = compiled * e * t * values / tp
    dropped = table.recomputes("core_attention") * (parts.core + parts.copies + output)
    norms, mlp = table.recomputes("norm"), table.recomputes("mlp")
    dropped = dropped + norms * parts.attention_input
    # Compiled norms hand their output to experts that are not compiled, and these keep it.
    hands_over = layer.compiled & ~whole_expert_rows(model, table) if layer.moe else False
    dropped = dropped + (norms & ~hands_over) * parts.mlp_input
    if layer.mlp == "dense":
        # A recomputed MLP gathers its input from the other ranks again, and keeps its own part of it. No GEMM
        # uses that part, so that compilers make it again too.
        own = np.where(layer.compiled, 0.0, parts.mlp_input / layer.part)
        gathers = mlp & ~norms & (layer.part > 1)
        dropped = dropped + gathers * (parts.mlp_input - own)
    activated = table.recomputes("activation") * parts.activated * parts.width
    # A mixture of experts is recomputed with its router and the copies of its tokens.
    mixture = parts.activations + parts.routing + parts.summed
    dropped = dropped + np.where(mlp, mixture, activated)
    chosen = np.where(table.recompute == SELECTIVE, whole - dropped, whole)
    if layer.engine.activations.saves_alternate_products and layer.mlp != "none":
        usual = (table.recompute == SELECTIVE) & (table.recompute_modules == CORE_ATTENTION)
        chosen = np.where(usual, _alternately_kept(layer, parts), chosen)
    return np.where(table.recompute == FULL, e * model.residual_streams * layer.residual, chosen)


def _alternately_kept(layer: _Layer, parts: _Parts) -> Floats:
    """Bytes of a layer that keeps its input, outputs of attention and collectives, and of every second GEMM.

    Grouped GEMMs of experts are none of these; their rows before and after the all-to-all are kept, and the
    chosen experts with their weights.
    """
    model, table, e, t = layer.model, layer.table, layer.element, layer.tokens
    tp = table.tensor_parallel
    # Outputs of reduce-scatters are kept besides the layer's input.
    kept = layer.residual * np.where(tp > 1, 3, 1) + t * attention_widths(model)[1] / tp
    kept = e * (kept + t * sum(_product_widths(layer)[::2])) + parts.core
    if not layer.moe:
        return kept
    exchanged = (table.expert_parallel > 1) * (parts.rows + t * model.top_k / tp)
    return kept + e * model.hidden * exchanged + CHOICE * t * model.top_k / tp


def _product_widths(layer: _Layer) -> list[Floats | float]:
    """Widths of the outputs of a layer's GEMMs on one device, in their order, without router and experts."""
    model, table = layer.model, layer.table
    tp, mla = table.tensor_parallel, model.latent_attention
    queries, half = attention_widths(model)[0] / tp, key_value_width(model, table) / 2
    attention: list[Floats | float] = [queries, half, half, model.hidden]
    if mla is not None:
        attention = [queries, mla.latent_width, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp]
        attention = [mla.q_lora_rank] * (mla.q_lora_rank > 0) + [*attention, model.hidden]
    width = (model.shared_expert_ffn if layer.moe else model.ffn) / tp
    return [*attention, width, width * model.gated, np.where(width > 0, model.hidden, 0.0)]


def _working(layer: _Layer, parts: _Parts, kept: Floats) -> Floats:
    """Further bytes during backward of a layer: recomputed tensors, and gradients within the layer."""
    model, constants, moe = layer.model, layer.engine.activations, layer.moe
    working = parts.whole - kept
    if constants.inner_gradients:
        working = _with_inner_gradients(layer, parts, working)
    if moe and constants.row_copies:
        working = working + constants.row_copies * layer.element * model.hidden * parts.rows
    return working


def _with_inner_gradients(layer: _Layer, parts: _Parts, again: Floats) -> Floats:
    """Bytes of a layer's backward pass with the gradients within it.

    Args:
        again: recomputed bytes in backward, [n].
    """
    model, table, compiled, moe = layer.model, layer.table, layer.compiled, layer.moe
    e, t, tp, h, width = layer.element, layer.tokens, table.tensor_parallel, model.hidden, parts.width
    # Of the GEMMs' inputs and outputs, and of the matrices that one compiled kernel writes together.
    inputs = 1 + model.gated
    matrices = 2 * e * h * width / np.maximum(parts.rows if moe else t, 1.0)
    inner = e * width * np.where(compiled, inputs, inputs + model.gated) + compiled * matrices * (not moe)
    # Then each matrix gives a gradient of its whole input, before tensor-parallel ranks sum these.
    summed = inputs * e * t * h * (tp > 1) * (not moe)
    working = again + np.maximum(inner, summed)
    if model.lora is not None and not moe:
        # A matrix and its adapter have an output each, where their sum is computed again, and a gradient
        # of their input each.
        outputs = layer.keeps.adapted_up * (table.recompute == FULL) + layer.keeps.down
        working = working + compiled * e * width * outputs
    if layer.rings.any() and layer.scores:
        # Sums of gradients in fp32, and keys and values on their way, once those of the MLP have gone.
        queries = attention_widths(model)[0]
        passing = t * (9 * queries / tp + 20 * key_value_width(model, table)) * (e / 2)
        gone = parts.activations + parts.mlp_input * np.ones(len(table))
        working = np.where(layer.rings, np.maximum(working, again + passing - gone), working)
    if moe:
        weights, copies = e * _expert_weights(model, table), e * h * parts.rows
        # Once the gradients of all experts of a layer are there, the activations of the experts are freed.
        last = weights - parts.activations - copies
        # Uncompiled experts still hold their rows, and the gradients of these by each first matrix.
        routed = parts.rows * model.expert_ffn / table.expert_tensor_parallel
        eager = weights + inputs * copies + e * routed - parts.inner * routed - parts.summed
        split = ~(compiled & whole_expert_rows(model, table))
        working = np.maximum(working, again + np.where(split, eager, last))
    return working


def _expert_weights(model: ModelSpec, table: LayoutTable) -> Floats:
    """Elements of the matrices of a layer's routed experts on one device, without those that are frozen."""
    each = (2 + model.gated) * model.hidden * model.expert_ffn * (model.lora is None)
    result: Floats = each * model.experts / (table.expert_parallel * table.expert_tensor_parallel)
    return result


def _delta_rule_bytes(model: ModelSpec, table: LayoutTable, compiled: Bools) -> Floats:
    """Bytes in fp32 that the chunked delta rule in plain operators keeps of one layer.

    For each token and value head: keys and queries with decays, remaining keys and the values that they read,
    values before and after correction, rows of a chunk's products and inverses, and the state before the
    chunk. For each key head: queries, keys and both products. Compiled layers do not keep the inputs of
    these.
    """
    sizes = model.linear_attention
    assert sizes is not None
    k, z, chunk = sizes.key_dim, sizes.value_dim, min(sizes.chunk, model.seq)
    shared, made = sizes.key_heads / sizes.value_heads, 2 * ~compiled
    each = (4 + (2 + made) * shared) * k + 2 * z + (3 + made + 2 * shared) * chunk + k * z / chunk
    result: Floats = 4 * tokens(model, table) * sizes.value_heads / table.tensor_parallel * each
    return result


def _context_copies(model: ModelSpec, table: LayoutTable) -> Floats:
    """Bytes that context parallelism keeps of one layer besides the rank's own queries, keys and values.

    With all_gather, these are the keys and values of the whole sequence, and the outputs of the two chunks of
    queries beside the concatenated one. With all_to_all, these are attention's output before and after the
    exchange, and the repeats of key/value heads. With a ring, values and outputs are as wide as keys, and
    narrower outputs are copies of these.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    kv = key_value_width(model, table)
    queries, values = (width / table.tensor_parallel for width in attention_widths(model))
    gathered = kv * (table.context_parallel - 1) + values
    exchanged = values + whole_heads_width(model, table) - kv
    latent = model.latent_attention is not None and model.attention_pattern[0] not in ("linear", "none")
    padded = (2 * (queries - values) + values) * (latent & (queries > values))
    kept = by_context_form(table, gathered, exchanged, padded)
    result: Floats = e * t * np.where(table.context_parallel > 1, kept, 0.0)
    return result


def output_gradient_bytes(model: ModelSpec, table: LayoutTable) -> Floats:
    """Bytes of the gradients of the outputs of a layer's GEMMs, for one microbatch.

    Split backward keeps them from the input-gradient pass to the weight-gradient pass (arXiv:2401.10241,
    section 2.1). For a model with experts the larger of its two MLPs counts.
    """
    e, t, tp = element_bytes(table.precision), tokens(model, table), table.tensor_parallel
    queries, _ = attention_widths(model)
    inputs, rows = 1 + model.gated, peak_routed_rows(model, table)
    dense = (inputs * model.ffn / tp + model.hidden) * t * (model.moe_layers < model.layers)
    shared = inputs * model.shared_expert_ffn / tp + model.hidden * bool(model.shared_expert_ffn)
    experts = (inputs * model.expert_ffn / table.expert_tensor_parallel + model.hidden) * rows
    width = t * (queries / tp + key_value_width(model, table) + model.hidden)
    norms = norm_count(model, "experts" if model.experts else "dense") * t * model.hidden
    norms = norms / np.where(table.sequence_parallel, tp, 1)
    if model.qk_norm:
        norms = norms + t * (queries / tp + key_value_width(model, table) / 2)
    # Weights of norms wait for the gradients of the outputs of norms, in the format in which norms compute.
    waiting = (4.0 if model.norm_from_one else e) * norms
    result: Floats = e * (width + np.maximum(dense, experts + shared * t)) + waiting
    return result
