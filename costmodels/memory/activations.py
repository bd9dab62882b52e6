"""Bytes that one layer keeps of one microbatch from forward to backward, tensor by tensor.

Korthikanti et al. (arXiv:2205.05198, sections 4 and 5), so counted that grouped queries, gated MLPs, flash
attention, experts, context parallelism and 32-bit activations come out of the same lines.
"""

from typing import NamedTuple

import numpy as np

from costmodels.layers.adapters import adapted_layers
from costmodels.layers.shapes import (
    attention_widths,
    compressor_width,
    element_bytes,
    filled_share,
    key_value_width,
    norm_count,
    peak_routed_rows,
    tokens,
    whole_heads_width,
)
from costmodels.spec.engine import Engine
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MlpKind
from costmodels.spec.table import FULL, RING, SELECTIVE, Bools, Floats, LayoutTable, by_context_form, code_of

CORE_ATTENTION = code_of("recompute_modules", ("core_attention",))
"""Modules that selective recomputation repeats unless others are named, as bits."""


NARROW_PRODUCTS = ("fp8", "mxfp8")
"""Formats whose GEMMs take operands in 8 bits."""


class KeptInputs(NamedTuple):
    """Inputs of matrices that backward needs: of those that train, and of those with adapters."""

    heads: bool
    """Whether the inputs are queries, keys and values."""
    up: bool
    down: bool
    adapted_up: int = 0
    """Matrices of the MLP's first half that have adapters."""


def kept_inputs(model: ModelSpec, mlp: MlpKind) -> KeptInputs:
    """Which inputs a layer keeps for gradients of weights; a frozen matrix needs none."""
    if model.lora is None:
        return KeptInputs(True, True, True)
    names = {layer.module.rpartition(".")[2] for layer in adapted_layers(model, mlp)}
    heads = not names.isdisjoint(("query", "key", "value", "latent", "key_value"))
    ups = len(names & {"up", "gate"})
    return KeptInputs(heads, ups > 0, "down" in names, ups)


def activation_bytes(
    model: ModelSpec, engine: Engine, table: LayoutTable, mlp: MlpKind
) -> tuple[Floats, Floats, Floats]:
    """Bytes of one layer and microbatch: kept on the device, recomputed, and kept on the host.

    For a GPT layer of 16-bit activations with dropout this is s b h (10 + 24/t + 5 a s / (h t)), with
    sequence parallelism s b h / t (34 + 5 a s / h) (arXiv:2205.05198, equations 2 and 4); selective
    recomputation drops the scores (equation 6), full recomputation keeps the input of the layer only.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    tp, sp, h = table.tensor_parallel, table.sequence_parallel, model.hidden
    part = np.where(sp, tp, 1)
    queries, values = attention_widths(model)
    keeps = kept_inputs(model, mlp)
    compiled = engine.activations.compiled & ~table.runs(*SPLIT_BACKWARD)
    # Layers that an engine which compiles others runs one by one, as where backward is split.
    eager = engine.activations.compiled & ~compiled
    apart = ~compiled & (model.gated and not engine.activations.fused_activation)
    activated: Floats = e * (int(keeps.down) + apart) * np.ones(len(table))
    inner: Floats = e * (1 + model.gated) + activated
    if model.activation == "clamped_silu":
        # Both halves clamped, and the sigmoid of one.
        inner = inner + 3 * e * eager
    residual = t * h / part
    unfused = engine.activations.unfused_norm_bytes * (engine.elementwise.norm_passes > 1)
    # Recipes of models with RMS norms, which came later, set both dropouts to 0.
    dropout = engine.activations.dropout and model.norm == "layernorm"
    norms = (2 * e + 2 * dropout + engine.activations.norm_bytes + unfused) * residual
    norms = norms * norm_count(model, mlp) / 2
    # Norms with weights from one keep their inputs in fp32.
    wider = (4 - e) * model.norm_from_one * eager
    norms = norms + wider * residual * norm_count(model, mlp)
    if model.norm_place == "around":
        # The compiler sums what attention adds up again.
        norms = norms - compiled * e * residual
    if model.parallel_residual:
        # Both norms have one input.
        norms = norms - e * residual
    # What hyper-connections mix, before attention and before the MLP.
    streams = model.residual_streams
    norms = norms + 2 * e * streams * residual * (streams > 1)
    gathered = part if engine.activations.regathers_sequence else 1
    attention_input, mlp_input = keeps.heads * e * t * h / gathered, keeps.up * e * t * h / gathered
    kind, moe = model.attention_pattern[0], mlp == "experts"
    attention = e * t * ((queries + values) / tp + key_value_width(model, table))
    if model.attention_gate and kind not in ("linear", "none"):
        attention = attention + 2 * e * t * values / tp
    # Queries and keys before their norms too, and before their positions.
    before = int(model.qk_norm) + int(engine.activations.keeps_unrotated and model.position == "rope")
    if kind == "linear":
        # What the convolution took, and the output before its norm and gate.
        assert model.linear_attention is not None
        attention = attention + e * t * (model.linear_attention.conv_size + values) / tp
    elif before:
        kept_heads = before * e + model.qk_norm * wider
        attention = attention + kept_heads * t * (queries / tp + key_value_width(model, table) / 2)
    if engine.activations.packs_attention and engine.attention.flash:
        attention = attention + e * t * (queries / tp + key_value_width(model, table))
    if kind == "none":
        attention_input = attention_input * 0.0
    if model.latent_attention is not None and kind not in ("linear", "none"):
        # Ranks compress their own tokens, and gather what is compressed and normalised.
        mla = model.latent_attention
        compressed = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        made = compressed * (1 / part + 1 / gathered) + compressor_width(model) / part
        attention = attention + e * t * made
        attention_input = e * t * h / (part if mla.q_lora_rank else gathered)
    if kind == "linear" and engine.activations.plain_delta_rule:
        core = _delta_rule_bytes(model, table, compiled)
    elif kind in ("linear", "none"):
        core = np.zeros(len(table))
    elif engine.attention.flash:
        core = 4 * t * model.heads / tp
    else:
        score = (
            e + dropout * (e + 1)
            if engine.activations.score_bytes is None
            else engine.activations.score_bytes
        )
        core = t * model.seq * model.heads / tp * score
    if moe:
        rows = peak_routed_rows(model, table)
        if engine.activations.drops_rows:
            rows = rows * filled_share(model, table)
        etp = table.expert_tensor_parallel
        width = rows * model.expert_ffn / etp + t * model.shared_expert_ffn / tp
        # The router's input, and that of the shared experts where they gather it and keep it.
        own = (tp > 1) & (np.asarray(gathered) == 1) & (model.shared_expert_ffn > 0)
        mlp_input = e * t * h * (1 / tp + keeps.up * own)
        # The rows that experts take in, those that are summed up, and the router's fp32 scores.
        summed = rows / np.where(table.expert_parallel > 1, etp, 1)
        summed = summed * (engine.activations.expert_outputs)
        routing = e * h * (rows * (model.lora is None) + summed) + 4 * t * model.experts / tp
    else:
        width, routing = t * model.ffn / tp * (mlp == "dense"), np.zeros(len(table))
        mlp_input = mlp_input * (mlp == "dense")
    kept_casts: Floats | float = 0.0
    if compiled.any() and table.precision in NARROW_PRODUCTS and not moe:
        # Compiled, what is cast to 8 bits for a GEMM is made again from what came before it: the
        # activated half of the MLP, and normalised inputs, of which gathered ones are kept in 8 bits. Of
        # split matrices those with the weights' transpose in 8 bits are kept, but for queries and keys.
        narrow = np.where(sp & (tp > 1), 0.5, 0.0)
        attention_input = np.where(compiled, narrow * attention_input, attention_input)
        mlp_input = np.where(compiled, narrow * mlp_input, mlp_input)
        made_again = compiled * e * int(keeps.down)
        inner, activated = inner - made_again, activated - made_again
        elements = h * (values + (2 + model.gated) * model.ffn * (mlp == "dense"))
        kept_casts = compiled * (tp > 1) * elements / tp
    if engine.activations.fp8_inputs and table.precision in NARROW_PRODUCTS and model.lora is None:
        # Attention keeps its own output besides; a router reads its input in 16 bits.
        narrower = e - 1
        attention = attention + t * values / tp * (kind not in ("linear", "none"))
        attention_input = attention_input - narrower * attention_input / e
        inner, activated = inner - narrower, activated - narrower
        if moe:
            routing = routing - narrower * h * rows
        else:
            mlp_input = mlp_input - narrower * mlp_input / e
    activations, layer_inputs = inner * width, attention_input + mlp_input
    if moe and model.shared_expert_gate:
        # What the shared experts give, before its gate.
        activations = activations + e * t * h / tp
    copies = _context_copies(model, table)
    whole = norms + layer_inputs + attention + copies + core + activations + routing + kept_casts
    if model.lora is not None:
        whole = whole + e * t * model.lora.rank * len(adapted_layers(model, mlp))
    # A compiled layer keeps what its collectives gave it, whatever it is told to recompute.
    norm = table.recomputes("norm") & ~(compiled & (part > 1))
    ring = (table.context_parallel > 1) & (table.context_parallel_form == RING)
    # Ring attention, which is not compiled, keeps its output.
    output = compiled * ~ring * e * t * values / tp if kind not in ("linear", "none") else 0.0
    dropped = table.recomputes("core_attention") * (core + copies + output) + norm * layer_inputs
    dropped = dropped + np.where(
        table.recomputes("mlp"), activations, table.recomputes("activation") * activated * width
    )
    chosen = np.where(table.recompute == SELECTIVE, whole - dropped, whole)
    if engine.activations.saves_alternate_products and mlp == "dense":
        usual = (table.recompute == SELECTIVE) & (table.recompute_modules == CORE_ATTENTION)
        # The last product's output is a whole partial sum; those of reduce-scatters are saved besides.
        saved = residual * np.where(tp > 1, 3, 1) + t * h + width + t * (queries + values) / tp
        saved = e * (saved + t * key_value_width(model, table) / 2) + core
        chosen = np.where(usual, saved, chosen)
    kept = np.where(table.recompute == FULL, e * streams * residual, chosen)
    working = whole - kept
    if engine.activations.inner_gradients:
        # Of the GEMMs' inputs and outputs, and of the matrices that one compiled kernel writes together.
        inputs = 1 + model.gated
        matrices = 2 * e * h * width / np.maximum(t if not moe else rows, 1.0)
        working = (
            working
            + e * width * np.where(compiled, inputs, inputs + model.gated)
            + compiled * matrices * (not moe)
        )
        if model.lora is not None and not moe:
            # A matrix and its adapter have an output each, where their sum is computed again, and a gradient
            # of their input each.
            outputs = keeps.adapted_up * (table.recompute == FULL) + keeps.down
            working = working + compiled * e * width * outputs
        if ring.any() and kind not in ("linear", "none"):
            # Sums of gradients in fp32, and keys and values on their way, once those of the MLP have gone.
            passing = t * (9 * queries / tp + 20 * key_value_width(model, table)) * (e / 2)
            gone = activations + mlp_input * np.ones(len(table))
            working = np.where(ring, np.maximum(working, whole - kept + passing - gone), working)
        if moe:
            # When gradients of all of a layer's experts are there, what the experts kept has gone.
            gone = activations + e * h * rows
            working = np.maximum(working, whole - kept + e * _expert_weights(model, table) - gone)
    if moe and engine.activations.row_copies:
        working = working + engine.activations.row_copies * e * h * rows
    if not table.offload_activations.any():
        return kept, working, np.zeros(len(table))
    # The input of attention, its queries, keys and values, and its output.
    moved = attention + copies * ~table.recomputes("core_attention") + attention_input * ~norm
    moved = np.where(table.offload_activations & (table.recompute != FULL), moved, 0.0)
    return kept - moved, working, moved


def _expert_weights(model: ModelSpec, table: LayoutTable) -> Floats:
    """Elements of the matrices of a layer's routed experts on one device, without those that are frozen."""
    each = (2 + model.gated) * model.hidden * model.expert_ffn * (model.lora is None)
    result: Floats = each * model.experts / (table.expert_parallel * table.expert_tensor_parallel)
    return result


def _delta_rule_bytes(model: ModelSpec, table: LayoutTable, compiled: Bools) -> Floats:
    """Bytes in fp32 that the delta rule keeps of one layer, computed in chunks by plain operators.

    Of each token and head of values: keys and queries with decays, keys that are left and what keys read;
    values before and after they are corrected; rows of a chunk's products and inverses; the state before the
    chunk. Of each head of keys: queries, keys and both products. Compiled, what they are made of is not kept.
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

    Gathered keys and values of the whole sequence, and the outputs of the two chunks of queries besides the
    joined one; or attention's output before and after the exchange, and the repeats of key/value heads.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    kv = key_value_width(model, table)
    values = attention_widths(model)[1] / table.tensor_parallel
    gathered = kv * (table.context_parallel - 1) + values
    exchanged = values + whole_heads_width(model, table) - kv
    kept = by_context_form(table, gathered, exchanged, 0.0)
    result: Floats = e * t * np.where(table.context_parallel > 1, kept, 0.0)
    return result


def output_gradient_bytes(model: ModelSpec, table: LayoutTable) -> Floats:
    """Bytes of the gradients of the outputs of a layer's GEMMs, for one microbatch.

    Split backward keeps them from the gradients of inputs to those of weights (arXiv:2401.10241,
    section 2.1); of a model with experts the larger of its two MLPs counts.
    """
    e, t, tp = element_bytes(table.precision), tokens(model, table), table.tensor_parallel
    queries, _ = attention_widths(model)
    inputs, rows = 1 + model.gated, peak_routed_rows(model, table)
    dense = (inputs * model.ffn / tp + model.hidden) * t * (model.moe_layers < model.layers)
    shared = inputs * model.shared_expert_ffn / tp + model.hidden * bool(model.shared_expert_ffn)
    experts = (inputs * model.expert_ffn / table.expert_tensor_parallel + model.hidden) * rows
    # The gradients of both sums of the residual stream and of what they add wait too.
    residual = 2 * t * model.hidden / np.where(table.sequence_parallel, tp, 1)
    width = t * (queries / tp + key_value_width(model, table) + model.hidden) + residual
    result: Floats = e * (width + np.maximum(dense, experts + shared * t))
    return result
