"""Sizes of a microbatch on one device: tokens, the widths of attention, and the rows of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import numpy as np

from costmodels.layers.expert_load import natural_load
from costmodels.spec.engine import Engine
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import ExpertLoad, LayerKind, MlpKind
from costmodels.spec.table import FULL, RING, UNIFORM, Bools, Floats, Ints, LayoutTable, distinct_rows

PEAK_LOAD = 1.25
"""Rows of the busiest device's experts in the fullest microbatch over those of an even load; memory is sized
for it.

This assumption holds for balanced routers; a router without balancing can be worse.
"""


def element_bytes(precision: str) -> int:
    """Bytes of one activation: 8-bit GEMMs keep their activations in bf16."""
    return 4 if precision in ("fp32", "tf32") else 2


def casts_weights_once(engine: Engine, table: LayoutTable) -> Bools:
    """Rows whose trained weights are cast to fp8 once a step, and not for each GEMM."""
    casts = table.precision == "fp8" and engine.gemm.of_recipe(table.fp8_recipe).fp8_weights_once
    result: Bools = table.keeps_whole & casts
    return result


def fuses_plain(engine: Engine, table: LayoutTable) -> Bools:
    """Rows whose weight-gradient GEMMs add to sums in fp32, of linear layers outside of routed experts.

    Experts and fp8 are left out. The runtime's kernels for them are not measured, and it adds apart where
    they are slower (`runtime.parallel.summing_trial`). The price of a GEMM and an addition holds either way.
    """
    narrow = table.precision in ("bf16", "fp16") and table.gradient_reduction != "bf16"
    fuses = engine.gemm.fused_plain and engine.activations.compiled and narrow
    result: Bools = table.keeps_whole & fuses & ~table.runs(*SPLIT_BACKWARD)
    return result


def tokens(model: ModelSpec, table: LayoutTable) -> Floats:
    """Tokens of one microbatch on one context-parallel rank."""
    return table.micro_batch_size * model.seq / table.context_parallel


def compiles_experts(model: ModelSpec) -> bool:
    """Return whether a model allows the bundled runtime to compile experts together with their layer.

    With a limited capacity, sizes depend on the routers' choices. Gradients of biases are sums of rows, which
    compilers compute in another order.
    """
    return not (model.router.capacity_factor or model.linear_bias or model.lora is not None)


def whole_expert_rows(model: ModelSpec, table: LayoutTable) -> Bools:
    """Rows in which the bundled runtime compiles layers with experts as one graph each.

    Four conditions must hold: one kernel computes the GEMMs of all experts, so no size depends on the
    routers' choices; nothing wraps the experts separately; nothing in attention needs a separate graph; and
    no backward pass recomputes a whole compiled layer.

    Args:
        model: model with the attention of the layer alone.
    """
    wraps = (table.zero_stage > 0) | table.offload_optimizer
    in_ring = (table.context_parallel > 1) & (table.context_parallel_form == RING)
    apart = model.attention_softcap > 0 or model.attention_pattern == ("linear",)
    again = (table.recompute == FULL) & (table.recompute_method == UNIFORM)
    again = again & (table.recompute_num_layers > 1)
    split = wraps | in_ring | table.offload_activations | again | (table.expert_parallel > 1)
    result: Bools = ~split & (compiles_experts(model) and not apart)
    return result


def experts_are_whole(model: ModelSpec, layout: Layout) -> bool:
    """Return whether a layout is one of `whole_expert_rows`."""
    return bool(whole_expert_rows(model, LayoutTable.of([layout]))[0])


CHUNK_TOKENS = 1024
"""Fewest tokens in a chunk of the bundled runtime's output GEMM."""

QUERY_BLOCK = 128
"""Number of queries for which the bundled runtime computes capped scores at a time."""

MOST_CHUNKS = 16


def loss_chunks(of_micro_batch: Ints | int, tensor_parallel: Ints | int) -> Ints:
    """Number of chunks, a power of two, into which the bundled runtime's loss splits the tokens of a
    microbatch.

    Each chunk has at least `CHUNK_TOKENS` tokens, times the ranks that share the vocabulary. Logits of a
    chunk then take as much memory as on one rank, and small GEMMs are equally rare.
    """
    found: Ints = np.ones_like(of_micro_batch)
    chunks = 2
    while chunks <= MOST_CHUNKS:
        whole = of_micro_batch & (chunks - 1) == 0
        enough = of_micro_batch >= chunks * CHUNK_TOKENS * tensor_parallel
        found = np.where(whole & enough, chunks, found)
        chunks *= 2
    return found


def attention_widths(model: ModelSpec) -> tuple[int, int]:
    """Total width of queries and of values over all heads, for a model with one kind of attention.

    For linear attention: the width of all projections of the input, and of the values.
    """
    mla, kind = model.latent_attention, model.attention_pattern[0]
    if kind == "none":
        return 0, 0
    if kind == "linear":
        assert model.linear_attention is not None
        return model.linear_attention.entry_size, model.linear_attention.value_size
    if mla is None:
        return model.q_size, model.q_size
    return model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), model.heads * mla.v_head_dim


def entry_width(model: ModelSpec) -> int:
    """Width of the tensor that attention gathers: its input, or the compressed input of latent attention."""
    mla = model.latent_attention
    if mla is None:
        return model.hidden
    return (mla.q_lora_rank or model.hidden) + mla.latent_width


def compressor_width(model: ModelSpec) -> int:
    """Width of the tensors from which compressed entries are made, for a model with one kind of attention."""
    compressed, mla, indexer = model.compressed_attention, model.latent_attention, model.indexer
    if compressed is None or mla is None or indexer is None:
        return 0
    return compressed.projected_width(model.attention_pattern[0], mla.latent_width, indexer)


def key_value_width(model: ModelSpec, table: LayoutTable) -> Floats:
    """Width of keys and values together on one device; if there are more devices than `kv_heads`, devices
    share a head."""
    if model.attention_pattern[0] in ("linear", "none"):
        return np.zeros(len(table))
    if model.latent_attention is not None and model.compressed_attention is not None:
        # All ranks hold the one key, which is the value too.
        return np.full(len(table), float(model.latent_attention.latent_width))
    if model.latent_attention is not None:
        result: Floats = sum(attention_widths(model)) / table.tensor_parallel
        return result
    return 2 * np.maximum(model.kv_heads / table.tensor_parallel, 1.0) * model.head_dim


def whole_heads_width(model: ModelSpec, table: LayoutTable) -> Floats:
    """Width of keys and values on one device when context-parallel ranks divide whole heads.

    Each of K heads is repeated cp / gcd(K, cp) times before the exchange. These are the fewest repeats that
    give every rank the heads of its queries.
    """
    width = key_value_width(model, table)
    if model.latent_attention is not None:
        return width
    heads = np.maximum(model.kv_heads // table.tensor_parallel, 1)
    result: Floats = width * (table.context_parallel // np.gcd(heads, table.context_parallel))
    return result


def norm_count(model: ModelSpec, mlp: MlpKind) -> int:
    """Number of norms of width `hidden` in a layer with the first layer's attention."""
    return model.norms(LayerKind(model.attention_pattern[0], mlp))


def _spread_rows(model: ModelSpec, table: LayoutTable, loads: Floats) -> Floats:
    """Rows of experts on the fullest rank, [n]: `loads` times the mean where there are several ranks, bounded
    by a limited capacity."""
    kept = np.where(table.expert_parallel > 1, loads, 1.0)
    limit = model.router.capacity_factor
    result: Floats = even_rows(model, table) * (np.minimum(kept, limit) if limit else kept)
    return result


def _loads_by_ranks(table: LayoutTable, load: Callable[[int], float]) -> Floats:
    ranks, places = np.unique(table.expert_parallel, return_inverse=True)
    result: Floats = np.array([load(count) for count in ranks.tolist()])[places]
    return result


def routed_rows(model: ModelSpec, table: LayoutTable, load: float | None = None) -> Floats:
    """Number of tokens that the experts of one device process, each token counted once for each of its
    experts.

    Every rank dispatches its own tokens, 1/tp of a microbatch. The experts of ep x etp ranks are spread over
    ep of them.

    Args:
        load: rows of the fullest device over the mean, used for several devices if the model gives no load;
            natural routing unless given.
    """
    if model.router.loads:
        said = model.router.load_of
        return _spread_rows(model, table, _loads_by_ranks(table, lambda ranks: _mean(said(ranks))))
    loads = natural_load(model, table) if load is None else np.full(len(table), load)
    return _spread_rows(model, table, loads)


def _mean(load: ExpertLoad | None) -> float:
    return 1.0 if load is None else load.mean


def peak_load(model: ModelSpec, ranks: int) -> float:
    """Rows of the fullest of `ranks` expert-parallel ranks over the mean, for which memory must suffice."""
    said = model.router.load_of(ranks)
    return PEAK_LOAD if said is None else max(PEAK_LOAD, said.peak)


def peak_routed_rows(model: ModelSpec, table: LayoutTable) -> Floats:
    """The rows of `routed_rows` times `peak_load`; a device with all experts needs no such reserve."""
    return _spread_rows(model, table, _loads_by_ranks(table, partial(peak_load, model)))


WIDEST_LOAD = 0.75
"""Largest standard deviation of an expert's load over the mean, for computing how full capacities are."""


def filled_share(model: ModelSpec, table: LayoutTable) -> Floats:
    """Rows of the fullest device as a share of its limited capacity, [n].

    Experts below the mean load leave room. Loads of experts are modelled as normal; their width gives the
    fullest device `peak_load` times the mean if there were no capacity.
    """
    limit, found = model.router.capacity_factor, np.ones(len(table))
    if not limit:
        return found
    for ranks in np.unique(table.expert_parallel).tolist():
        if ranks == 1:
            continue
        load, own = peak_load(model, ranks), model.experts / ranks
        # The expected largest of so many normal numbers (Blom 1958).
        largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        width = max(min((load - 1) * own**0.5 / largest, WIDEST_LOAD), 1e-9)
        at = (limit - 1) / width
        cut = width * (NormalDist().pdf(at) - at * (1 - NormalDist().cdf(at)))
        found[table.expert_parallel == ranks] = min(1.0, (1 - cut) * load / min(load, limit))
    return found


def even_rows(model: ModelSpec, table: LayoutTable) -> Floats:
    """The rows of `routed_rows` if all experts get the same number of tokens."""
    spread = table.expert_tensor_parallel / table.tensor_parallel
    result: Floats = tokens(model, table) * model.top_k * spread
    return result


def distinct_shapes(table: LayoutTable) -> tuple[LayoutTable, Ints]:
    """The few rows that differ in operator shapes or in launches, and for each row the index of its equal."""
    first, code = distinct_rows(
        [
            table.tensor_parallel,
            table.sequence_parallel,
            table.context_parallel,
            table.context_parallel_form,
            table.expert_parallel,
            table.expert_tensor_parallel,
            table.micro_batch_size,
            table.recompute,
            table.recompute_modules,
            # Of layers in a block, each is a unit of its own, whatever their number.
            np.where(table.recompute_method == UNIFORM, table.recompute_num_layers, 1),
            table.recompute_method,
            table.offload_activations,
            table.keeps_whole,
            table.pipeline_parallel > 1,
            table.runs(*SPLIT_BACKWARD),
            table.cuda_graphs,
        ]
    )
    return table.take(first), code
