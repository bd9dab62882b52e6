"""Parameters that the runtime wraps together with FSDP2: a layer, its routed experts, embedding and head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodels.layers.operators import padded_vocabulary
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, LayoutTable

Shape = tuple[Floats | float, ...]
"""Sides of a parameter on one device, before data parallelism splits it."""


@dataclass(frozen=True)
class Group:
    """Elements of the parameters of one group on one device; arrays of shape [n]."""

    whole: Floats
    """Before data parallelism splits them."""
    padded: Floats
    """When the shards of all ranks are gathered: as many as the first rank has, times the ranks."""
    shards: Floats
    """Ranks over which each parameter is split."""
    largest: Floats
    """Of the largest parameter, padded."""
    last: Floats
    """Of the last one."""
    elements: tuple[Floats, ...]
    """Of each."""
    shapes: tuple[Shape, ...]
    """Sides of each."""
    moved: Bools
    """Parameters are split along another side than the first, and so are copied on their way."""
    summed: Floats | float = 0.0
    """Of matrices whose gradients tensor-parallel ranks sum (`Structure.is_whole`), before data parallelism
    splits them."""
    largest_summed: Floats | float = 0.0
    """Of the largest of these."""
    summed_before: Floats | float = 0.0
    """Of those before it."""
    whole_shapes: tuple[Shape, ...] | None = None
    """Sides of a layer's parameters before tensor parallelism splits them; None for embedding and head."""
    any_side: bool = False
    """Routed experts: matrices of three sides, of which the first that can be is split evenly."""

    @property
    def own(self) -> Floats:
        """On the first of these ranks."""
        return self.padded / self.shards

    @property
    def matrix_sides(self) -> int:
        """Sides of a matrix, beside which there are vectors only."""
        return 3 if self.any_side else 2

    @property
    def local_sides(self) -> list[list[Floats]]:
        """Sides of each parameter on the first of these ranks, [n] each."""
        return [_local(shape, self.shards, self.any_side) for shape in self.shapes]


def group_of(
    shapes: list[Shape],
    shards: Floats,
    any_side: bool = False,
    summed: tuple[Floats | float, ...] = (),
    of_whole: list[Shape] | None = None,
) -> Group:
    """A group of parameters of these shapes, split over `shards` ranks.

    FSDP2 splits the first side and rounds the parts up (`_fsdp_param.py`); with `any_side` the first one that
    `shards` divides, as the runtime does with experts.

    Args:
        summed: `Group.summed`, of each such matrix.
        of_whole: `Group.whole_shapes`.
    """
    whole, padded, largest = (np.zeros_like(shards) for _ in range(3))
    every, moved = [], np.zeros(len(shards), dtype=np.bool_)
    for shape in shapes:
        elements = np.ones_like(shards)
        for side in shape:
            elements = elements * side
        first = np.asarray(shape[0], dtype=np.float64)
        filled = elements / first * np.ceil(first / shards) * shards
        if any_side:
            even = np.any(
                [np.asarray(side) % shards == 0 for side in np.broadcast_arrays(*shape, shards)[:-1]], axis=0
            )
            filled = np.where(even, elements, filled)
            moved |= even & (first % shards > 0)
        whole, padded, largest = whole + elements, padded + filled, np.maximum(largest, filled)
        every.append(elements)
    return Group(
        whole,
        padded,
        shards,
        largest,
        every[-1],
        tuple(every),
        tuple(shapes),
        moved,
        *_summed(summed),
        None if of_whole is None else tuple(of_whole),
        any_side,
    )


def _local(shape: Shape, shards: Floats, any_side: bool) -> list[Floats]:
    """Sides of what the first of `shards` ranks has of a parameter, split as `group_of` says."""
    sides: list[Floats] = [
        np.broadcast_to(np.asarray(side, dtype=np.float64), shards.shape) for side in shape
    ]
    even = [side % shards == 0 for side in sides] if any_side else []
    chosen = np.where(np.any(even, axis=0), np.argmax(even, axis=0), 0) if even else np.zeros(len(shards))
    return [np.where(chosen == number, np.ceil(side / shards), side) for number, side in enumerate(sides)]


def layer_shapes(model: ModelSpec, table: LayoutTable, moe: bool) -> list[Shape]:
    """Parameters of one layer, without its routed experts."""
    tp = table.tensor_parallel.astype(np.float64)
    h = float(model.hidden)
    norm: list[Shape] = [(h,)] * (2 if model.norm == "layernorm" else 1)
    shapes = 2 * norm + _attention_shapes(model, tp)
    if not moe:
        return shapes + _mlp_shapes(model, model.ffn / tp)
    shapes += [(float(model.experts), h)]
    if model.shared_expert_ffn:
        shapes += _mlp_shapes(model, model.shared_expert_ffn / tp)
    return shapes + [(1.0, h)] * model.shared_expert_gate


def _attention_shapes(model: ModelSpec, tp: Floats) -> list[Shape]:
    h, mla = float(model.hidden), model.latent_attention
    if mla is not None:
        queries = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) / tp
        rank, latent = float(mla.q_lora_rank), float(mla.kv_lora_rank)
        shapes: list[Shape] = [(rank, h), (rank,)] if mla.q_lora_rank else []
        shapes += [(latent + mla.qk_rope_head_dim, h), (latent,), (queries, rank or h)]
        shapes += [(model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp, latent)]
        return shapes + [(h, model.heads * mla.v_head_dim / tp)] + [(h,)] * model.linear_bias
    rows = [model.q_size / tp, model.kv_size / tp, model.kv_size / tp]
    shapes = [(side, h) for side in rows]
    if model.linear_bias or model.qkv_bias:
        shapes += [(side,) for side in rows]
    shapes += [(float(model.head_dim),)] * (2 * model.qk_norm)
    return shapes + [(h, model.q_size / tp)] + [(h,)] * model.linear_bias


def _mlp_shapes(model: ModelSpec, width: Floats) -> list[Shape]:
    h, inputs = float(model.hidden), 1 + model.gated
    shapes: list[Shape] = [(width, h)] * inputs + [(h, width)]
    return shapes + ([(width,)] * inputs + [(h,)]) * model.linear_bias


def expert_shapes(model: ModelSpec, table: LayoutTable) -> list[Shape]:
    """The stacked parameters of a layer's routed experts, in the order of `runtime.model.experts`."""
    h, inputs = float(model.hidden), 1 + model.gated
    experts = model.experts / table.expert_parallel.astype(np.float64)
    width = model.expert_ffn / table.expert_tensor_parallel.astype(np.float64)
    shapes: list[Shape] = []
    for sides in [(width, h)] * inputs + [(h, width)]:
        shapes += [(experts, *sides)] + [(experts, sides[0])] * model.linear_bias
    return shapes


def without_tensor_parallel(table: LayoutTable) -> LayoutTable:
    """The same rows, of ranks that split no matrix."""
    ones = np.ones_like(table.tensor_parallel)
    return replace(table, tensor_parallel=ones, expert_tensor_parallel=ones)


def summed_of_layer(model: ModelSpec, table: LayoutTable, moe: bool) -> tuple[Floats, ...]:
    """Elements of each of a layer's matrices whose gradients tensor-parallel ranks sum."""
    h, mla = float(model.hidden), model.latent_attention
    ranks = () if mla is None else (mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim)
    rows = (model.experts, int(model.shared_expert_gate)) if moe else ()
    sequence = table.sequence_parallel.astype(np.float64)
    whole = (table.tensor_parallel > 1).astype(np.float64)
    found: list[Floats] = [rank * h * sequence for rank in ranks]
    found += [number * h * whole for number in rows]
    return tuple(found)


def summed_of_embedding(model: ModelSpec, table: LayoutTable) -> tuple[Floats, ...]:
    """The same of the embedding."""
    positions = float(model.max_positions * model.hidden) * (model.position == "learned")
    return (positions * table.sequence_parallel.astype(np.float64),)


def _summed(
    matrices: tuple[Floats | float, ...],
) -> tuple[Floats | float, Floats | float, Floats | float]:
    """Of all, of the largest, and of those before it."""
    total: Floats | float = 0.0
    largest: Floats | float = 0.0
    before: Floats | float = 0.0
    for elements in matrices:
        before = np.where(elements > largest, total, before)
        total, largest = total + elements, np.maximum(largest, elements)
    return total, largest, before


def embedding_shapes(model: ModelSpec, table: LayoutTable) -> list[Shape]:
    """Parameters of the embedding."""
    h = float(model.hidden)
    shapes: list[Shape] = [(padded_vocabulary(model, table) / table.tensor_parallel, h)]
    return shapes + [(float(model.max_positions), h)] * (model.position == "learned")


def head_shapes(model: ModelSpec, table: LayoutTable, with_matrix: bool) -> list[Shape]:
    """Parameters of final norm and, unless it is tied to an embedding that is here too, of output matrix."""
    h = float(model.hidden)
    shapes: list[Shape] = [(h,)] * (2 if model.norm == "layernorm" else 1)
    return shapes + [(padded_vocabulary(model, table) / table.tensor_parallel, h)] * with_matrix
