"""The moment of a step with the most bytes: gradients are allocated while activations are freed.

PyTorch allocates the gradients of a stage in its first backward pass, layer by layer from the last one.
Before that pass all activations in flight exist without gradients. Engines with a gradient buffer have both
at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES
from costmodels.spec.schedules import GATHERED_STAGES
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable


def passes_in_flight(table: LayoutTable, ranks: Ranks, flying: dict[str, Floats]) -> Floats:
    """Most microbatches between forward and backward, in units of one chunk, over all chunks, [n, k].

    Args:
        flying: layers in flight, by kind, each [n, k].
    """
    layers = sum(flying.values(), np.zeros(()))
    chunks = table.virtual_pipeline_parallel[:, None]
    held: Floats = np.where(ranks.layers > 0, chunks * layers / np.maximum(ranks.layers, 1.0), 1.0)
    return np.maximum(held, 1.0)


class Held(NamedTuple):
    """Bytes that are allocated and freed within a step, [n, k] each."""

    activations: Floats
    """Bytes of the activations of all microbatches in flight."""
    again: Floats
    """Bytes of the backward pass of one layer, while the activations of all other layers exist."""
    at_end: Floats
    """Bytes of the backward pass of a stage's first layer, when the rest of its microbatch is freed."""
    logits: Floats
    late: Floats
    """The part of `at_end` that stays until backward has ended: gradients of a unit that FSDP2 wraps as a
    whole."""
    gradients: Floats
    """Bytes of the gradients of all stages."""
    layer_gradients: Floats
    """Bytes of the gradients of one layer."""


def fullest_moment(table: LayoutTable, flight: Floats, held: Held) -> tuple[Floats, Floats, Floats]:
    """Bytes of activations, logits and gradients that exist together at the fullest moment, [n, k] each.

    While forward passes remain, each backward pass frees as much as a forward pass allocates. Backward passes
    go through the chunks from the last one, in turns of pp microbatches. After the last forward pass, memory
    is only freed. Three moments can be the fullest: the last one with all activations; the end of the
    backward pass after it; and the end of the first backward pass of the last chunk that gets gradients. A
    layer's gradients are complete when the temporary bytes of its backward pass are freed.

    Args:
        flight: microbatches of one chunk in flight, over all chunks, [n, k].
    """
    chunks = table.virtual_pipeline_parallel[:, None]
    turn = np.where(chunks > 1, turn_of(table)[:, None], 1)
    # In one turn ZeRO reduces the gradients of each chunk before those of the next one are there.
    most = np.where(
        (chunks > 1) & (table.micro_batches[:, None] <= turn) & ~table.keeps_whole[:, None], 1, chunks
    )
    steady = np.maximum(table.micro_batches[:, None] * chunks - flight, 0.0)
    have = np.minimum(np.ceil(steady / turn - 1e-9), most)
    # Sums of gradients that a CUDA graph writes to keep their places.
    have = np.where(table.cuda_graphs[:, None], most, have)
    each = held.activations / flight
    rest = np.maximum(held.at_end - held.layer_gradients, 0.0)
    draining = each * np.minimum(np.where(chunks > 1, turn, flight) - 1, flight - 1)
    moments = (
        (held.activations + held.again, held.logits, held.gradients * have / chunks),
        (
            held.activations - each + rest,
            np.where(steady > 0, held.logits, held.late),
            held.gradients * np.minimum(have + 1, most) / chunks,
        ),
        (draining + rest, held.late, held.gradients * most / chunks),
    )
    activations, logits, gradients = moments[0]
    for other in moments[1:]:
        fuller = sum(other, np.zeros(())) > activations + logits + gradients
        activations, logits, gradients = (
            np.where(fuller, new, old)
            for new, old in zip(other, (activations, logits, gradients), strict=True)
        )
    return activations, logits, gradients


def turn_of(table: LayoutTable) -> Ints:
    """Microbatches that a chunk processes before the next chunk has its turn, [n]."""
    result: Ints = np.where(table.runs(*V_SCHEDULES), 1, table.pipeline_parallel)
    return result


def least_moment(table: LayoutTable, _: Floats, held: Held) -> tuple[Floats, Floats, Floats]:
    """A lower bound of `fullest_moment` for any microbatches in flight and any split, bytes [n, k].

    Without chunks all gradients exist from the first microbatch after the first rank's warm-up.
    """
    gradients = held.gradients * least_gradient_share(table)[:, None]
    together = (table.virtual_pipeline_parallel == 1) & (table.micro_batches > table.pipeline_parallel)
    alone = ~together[:, None]
    activations = held.activations + held.again
    fuller = activations + held.logits >= gradients
    without = alone & ~fuller
    return (
        np.where(without, 0.0, activations),
        np.where(without, 0.0, held.logits),
        np.where(alone & fuller, 0.0, gradients),
    )


def least_gradient_share(table: LayoutTable) -> Floats:
    """The least share of a rank's stages whose gradients exist at the same time, [n]."""
    result: Floats = np.where(table.keeps_whole, 1.0, 1 / table.virtual_pipeline_parallel)
    return result


def lets_go(table: LayoutTable) -> Bools:
    """Rows whose layers free their copies of parameters one by one, in a step with one backward pass."""
    single = (table.pipeline_parallel == 1) & (table.micro_batches == 1)
    single = single & ~table.cuda_graphs & (table.replicas > 1)
    result: Bools = single & (table.keeps_whole | (table.zero_stage < 3))
    return result


def least_stages(table: LayoutTable) -> Floats:
    """The fewest stages of a rank with whole parameters while the most stages have gradients, [n]."""
    chunks = table.virtual_pipeline_parallel
    whole = np.where(table.micro_batches > turn_of(table), chunks, 1)
    gathered = np.where(frees_after_forward(table), 1, np.minimum(chunks, GATHERED_STAGES))
    result: Floats = np.where(table.keeps_whole, whole, gathered) * 1.0 * ~lets_go(table)
    return result


def frees_after_forward(table: LayoutTable) -> Bools:
    """Rows that free a stage's parameters after each forward pass (`_keep_gathered` of the runtime)."""
    result: Bools = (table.zero_stage == 3) & ~table.runs(*SPLIT_BACKWARD)
    return result
