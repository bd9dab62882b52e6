"""Which moment of a step is the fullest: gradients appear while activations of micro batches go.

PyTorch makes the gradients of a stage in its first backward pass, layer by layer from the last one. Before it,
activations of all micro batches in flight are there without them. Engines that keep gradients in a buffer of
their own have both at once.
"""

from __future__ import annotations

import numpy as np

from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.layout import V_SCHEDULES
from costmodels.spec.schedules import GATHERED_STAGES
from costmodels.spec.table import Floats, LayoutTable


def passes_in_flight(table: LayoutTable, ranks: Ranks, flying: dict[str, Floats]) -> Floats:
    """Micro batches of one chunk that are between forward and backward at most, over all chunks, [n, k].

    Args:
        flying: layers in flight, by kind, each [n, k].
    """
    layers = sum(flying.values(), np.zeros(()))
    chunks = table.virtual_pipeline_parallel[:, None]
    held: Floats = np.where(ranks.layers > 0, chunks * layers / np.maximum(ranks.layers, 1.0), 1.0)
    return np.maximum(held, 1.0)


def fullest_moment(
    table: LayoutTable, flight: Floats, activations: Floats, gradients: Floats
) -> tuple[Floats, Floats]:
    """Bytes of activations and of gradients that are there together at the fullest moment, [n, k] each.

    While forward passes remain, as many activations are made as freed, and backward passes go through the
    chunks, the last one first, in turns of pp micro batches. After that, activations only go. Three moments can
    be the fullest: the last at which all activations are there, the end of the backward pass after it, and
    the end of the first backward pass of the chunk that is the last to have gradients.

    Args:
        flight: micro batches of one chunk in flight, over all chunks, [n, k].
        activations: bytes of all of them.
        gradients: bytes once all chunks have had a backward pass.
    """
    chunks = table.virtual_pipeline_parallel[:, None]
    turn = np.where(table.runs(*V_SCHEDULES), 1, table.pipeline_parallel)[:, None]
    turn = np.where(chunks > 1, turn, 1)
    # Where each chunk has its backward passes in one turn, ZeRO reduces its gradients before the next chunk's.
    most = np.where(
        (chunks > 1) & (table.micro_batches[:, None] <= turn) & ~table.keeps_whole[:, None], 1, chunks
    )
    steady = np.maximum(table.micro_batches[:, None] * chunks - flight, 0.0)
    have = np.minimum(np.ceil(steady / turn - 1e-9), most)
    each = activations / flight
    moments = (
        (activations, gradients * have / chunks),
        (activations - each, gradients * np.minimum(have + 1, most) / chunks),
        (each * np.minimum(np.where(chunks > 1, turn, flight) - 1, flight - 1), gradients * most / chunks),
    )
    total = np.stack([sum(moment) for moment in moments])
    fullest = total.argmax(axis=0)
    shape = total.shape[1:]
    held, made = (
        np.choose(fullest, [np.broadcast_to(moment[place], shape) for moment in moments]) for place in (0, 1)
    )
    return held, made


def gathered_share(table: LayoutTable) -> Floats:
    """The share of a rank's stages whose parameters are gathered at a time, with ZeRO 1 and above, [n]."""
    several = np.minimum(GATHERED_STAGES / table.virtual_pipeline_parallel, 1.0)
    result: Floats = np.where(table.keeps_whole, 1.0, several)
    return result


def fresh_gradient_share(table: LayoutTable) -> Floats:
    """The share of a rank's stages that hold gradients in 16 bits beside their fp32 sums, [n].

    With split backward FSDP2 adds a micro batch's gradients of weights up when the next backward pass of the stage
    begins, so that those of all stages but the one at work are there.
    """
    chunks = table.virtual_pipeline_parallel
    several = table.runs("interleaved_zb", "zbv") & ~table.keeps_whole
    turn = np.where(table.runs(*V_SCHEDULES), 1, table.pipeline_parallel)
    result: Floats = np.where(several & (table.micro_batches > turn), (chunks - 1) / chunks, 0.0)
    return result
