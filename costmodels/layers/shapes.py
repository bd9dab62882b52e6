"""Sizes of a microbatch on one device: tokens, the widths of attention, and the rows of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import numpy as np

from costmodels.layers.expert_load import natural_load
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import ExpertLoad, LayerKind, MlpKind
from costmodels.spec.table import UNIFORM, Floats, Ints, LayoutTable, distinct_rows

PEAK_LOAD = 1.25
"""Rows for memory: of the busiest device's experts over those of an even load, in the fullest microbatch.

An assumption, which holds for balanced routers; one that nothing balances can be worse.
"""


def element_bytes(precision: str) -> int:
    """Bytes of one activation: 8-bit GEMMs keep their activations in bf16."""
    return 4 if precision in ("fp32", "tf32") else 2


def tokens(model: ModelSpec, table: LayoutTable) -> Floats:
    """Tokens of one microbatch on one context-parallel rank."""
    return table.micro_batch_size * model.seq / table.context_parallel


def compiles_experts(model: ModelSpec) -> bool:
    """Return whether a model allows the bundled runtime to compile experts together with their layer.

    A limited capacity makes sizes depend on what routers choose, and gradients of biases are sums of rows,
    which compilers make in ways of their own.
    """
    return not (model.router.capacity_factor or model.linear_bias or model.lora is not None)


def experts_are_whole(model: ModelSpec, layout: Layout) -> bool:
    """Return whether the bundled runtime compiles layers with experts as one graph each.

    No size in one depends on what routers choose, as long as one kernel makes the GEMMs of all experts;
    nothing wraps the experts apart, nothing in attention needs a graph of its own, and no backward pass runs
    all of a compiled layer again.

    Args:
        model: model with the attention of the layer alone.
    """
    wraps = layout.zero_stage > 0 or layout.offload_optimizer
    in_ring = layout.context_parallel > 1 and layout.context_parallel_form == "ring"
    parts = in_ring or layout.offload_activations or model.attention_softcap > 0
    parts = parts or model.attention_pattern == ("linear",)
    again = layout.recompute == "full" and layout.recompute_method == "uniform"
    again = again and layout.recompute_num_layers > 1
    return compiles_experts(model) and layout.expert_parallel == 1 and not (wraps or parts or again)


CHUNK_TOKENS = 1024
"""Fewest tokens that the bundled runtime multiplies by a whole output matrix at a time."""

QUERY_BLOCK = 128
"""Queries whose capped scores the bundled runtime has at a time."""

MOST_CHUNKS = 16


def loss_chunks(of_micro_batch: Ints | int, tensor_parallel: Ints | int) -> Ints:
    """Parts, a power of two, that the bundled runtime's loss splits the tokens of a microbatch into.

    As many as leave `CHUNK_TOKENS` to each, times the ranks that share the vocabulary: logits of a chunk then
    take as much memory as on one rank, and small GEMMs are as seldom.
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
    """Widths of all heads' queries and of all heads' values, of a model with one kind of attention.

    Of linear attention, of all that its input is projected to, and of the values.
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
    """Width of what attention gathers: its input, or what latent attention has compressed of it."""
    mla = model.latent_attention
    if mla is None:
        return model.hidden
    return (mla.q_lora_rank or model.hidden) + mla.latent_width


def compressor_width(model: ModelSpec) -> int:
    """Width of what compressed entries are made of, of a model with one kind of attention."""
    compressed, mla, indexer = model.compressed_attention, model.latent_attention, model.indexer
    if compressed is None or mla is None or indexer is None:
        return 0
    return compressed.projected_width(model.attention_pattern[0], mla.latent_width, indexer)


def key_value_width(model: ModelSpec, table: LayoutTable) -> Floats:
    """Width of keys and values together on one device; devices beyond `kv_heads` share a head."""
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
    """Width of keys and values on one device when context-parallel ranks share out whole heads.

    Each of K heads is repeated cp / gcd(K, cp) times before the exchange. That is the fewest repeats with
    which every rank has the heads that its queries need.
    """
    width = key_value_width(model, table)
    if model.latent_attention is not None:
        return width
    heads = np.maximum(model.kv_heads // table.tensor_parallel, 1)
    result: Floats = width * (table.context_parallel // np.gcd(heads, table.context_parallel))
    return result


def norm_count(model: ModelSpec, mlp: MlpKind) -> int:
    """Norms of width `hidden` in a layer with the first layer's attention."""
    return model.norms(LayerKind(model.attention_pattern[0], mlp))


def _spread_rows(model: ModelSpec, table: LayoutTable, loads: Floats) -> Floats:
    """Rows of experts of which the fullest rank has `loads` times the mean, [n], where there are several; a
    limited capacity takes in no more."""
    kept = np.where(table.expert_parallel > 1, loads, 1.0)
    limit = model.router.capacity_factor
    result: Floats = _even_rows(model, table) * (np.minimum(kept, limit) if limit else kept)
    return result


def _loads_by_ranks(table: LayoutTable, load: Callable[[int], float]) -> Floats:
    ranks, places = np.unique(table.expert_parallel, return_inverse=True)
    result: Floats = np.array([load(count) for count in ranks.tolist()])[places]
    return result


def routed_rows(model: ModelSpec, table: LayoutTable, load: float | None = None) -> Floats:
    """Tokens that the experts of one device take in, each token once for each of its experts.

    Every rank sends out tokens of its own, 1/tp of those of a microbatch; the experts of ep x etp ranks are
    spread over ep of them.

    Args:
        load: rows of the fullest device over the mean, where there are several devices and the model gives no
            load; natural routing unless given.
    """
    if model.router.loads:
        said = model.router.load_of
        return _spread_rows(model, table, _loads_by_ranks(table, lambda ranks: _mean(said(ranks))))
    loads = natural_load(model, table) if load is None else np.full(len(table), load)
    return _spread_rows(model, table, loads)


def _mean(load: ExpertLoad | None) -> float:
    return 1.0 if load is None else load.mean


def peak_load(model: ModelSpec, ranks: int) -> float:
    """Rows of the fullest of `ranks` expert-parallel ranks over the mean that memory has to hold."""
    said = model.router.load_of(ranks)
    return PEAK_LOAD if said is None else max(PEAK_LOAD, said.peak)


def peak_routed_rows(model: ModelSpec, table: LayoutTable) -> Floats:
    """Rows as `routed_rows` with the head-room of `peak_load`; a device with all experts needs none."""
    return _spread_rows(model, table, _loads_by_ranks(table, partial(peak_load, model)))


WIDEST_LOAD = 0.75
"""Largest standard deviation of an expert's load over the mean that capacities are filled by."""


def filled_share(model: ModelSpec, table: LayoutTable) -> Floats:
    """Share of the rows that a limited capacity lets through which the fullest device has, [n].

    Experts that are asked for less than the mean leave room. Loads of experts are taken as normal, so wide
    that the fullest device, of experts without a capacity, would have `peak_load` times the mean.
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


def _even_rows(model: ModelSpec, table: LayoutTable) -> Floats:
    spread = table.expert_tensor_parallel / table.tensor_parallel
    result: Floats = tokens(model, table) * model.top_k * spread
    return result


def distinct_shapes(table: LayoutTable) -> tuple[LayoutTable, Ints]:
    """The few rows that differ in the shape of their operators or in what launches them, and which of them
    each row is like."""
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
