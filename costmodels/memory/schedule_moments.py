"""Tensors that a rank with several stages holds together, at each moment of its schedule.

Different tensors are largest at different moments. Gradients are allocated while activations are freed,
weight gradients may come later than input gradients, and stages are gathered and freed. The order of passes
is simulated once for each schedule, pipeline and number of microbatches. The result is a few moments, none of
which is less than another in every kind of tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import (
    BACKWARD,
    FORWARD,
    GATHERED_STAGES,
    INPUTS,
    WEIGHTS,
    passes_of_rank,
)
from costmodels.spec.table import SCHEDULES, Bools, Floats, Ints, LayoutTable, combined_key, distinct_numbers

ROUNDS = 4
"""Number of rounds of microbatches after which a step only repeats itself."""


class Alive(NamedTuple):
    """Tensors of a rank at its fullest moment: numbers of one-stage units, or bytes of such units; [n, k]
    each."""

    flights: Floats
    """Number of microbatches between forward and the end of backward, over all stages."""
    waits: Floats
    """Number of microbatches in flight that wait for their weight gradients."""
    head_flights: Floats
    """`flights` of the model's last stage."""
    sums: Floats
    """Number of stages with summed gradients."""
    head_sums: Floats
    """`sums` of the model's last stage."""
    first_sums: Floats
    """`sums` of the model's first stage."""
    fresh: Floats
    """Number of stages with 16-bit gradients beside their sums."""
    left: Floats
    """Number of stages whose weight gradients of a separate pass wait for the stage's next backward pass."""
    reduced: Floats
    """Number of stages whose gradients are shards, as their last backward pass has ended."""
    added: Floats
    """1 where a stage is about to add weight gradients that were computed in a separate pass."""
    whole: Floats
    """Number of stages whose whole parameters are allocated in the format of GEMMs."""


def played(table: LayoutTable, ranks: Ranks) -> Bools:
    """The ranks whose fullest moment is found here, [n, k]."""
    result: Bools = (table.virtual_pipeline_parallel > 1)[:, None] & (ranks.place > 0)
    return result


def fullest(table: LayoutTable, ranks: Ranks, sizes: Alive, later: Bools, frees: Bools) -> Alive:
    """Contents of each rank at its fullest moment, [n, k]; zero for ranks that are not `played`.

    Args:
        sizes: bytes of one unit of each.
        later: rows whose 16-bit gradients wait until their stage's next backward pass adds them.
        frees: rows that free a stage's parameters after each forward pass.
    """
    rows, columns = np.nonzero(played(table, ranks))
    found = np.zeros((len(Alive._fields), *ranks.place.shape))
    fields = (
        table.schedule[rows],
        table.pipeline_parallel[rows],
        table.virtual_pipeline_parallel[rows],
        few_micro_batches(table)[rows],
        ranks.place[rows, columns].astype(np.int64) - 1,
        table.keeps_whole[rows],
        later[rows],
        frees[rows],
    )
    key = combined_key(fields)
    order = np.argsort(key, kind="stable")
    rows, columns, key = rows[order], columns[order], key[order]
    each = np.stack([np.broadcast_to(size, ranks.place.shape)[rows, columns] for size in sizes])
    starts = np.concatenate([[0], np.flatnonzero(np.diff(key)) + 1, [len(key)]])
    firsts = zip(*(field[order[starts[:-1]]].tolist() for field in fields), strict=True) if len(key) else ()
    most = np.empty((len(key), len(Alive._fields)))
    for start, end, (schedule, *rest) in zip(starts[:-1].tolist(), starts[1:].tolist(), firsts, strict=False):
        every = moments(SCHEDULES[schedule], *rest)
        most[start:end] = every[(every @ each[:, start:end]).argmax(axis=0)] if len(every) > 1 else every
    found[:, rows, columns] = most.T
    return Alive(*found)


def few_micro_batches(table: LayoutTable) -> Ints:
    """The fewest microbatches that give the same set of moments, [n]."""
    few = ROUNDS * table.pipeline_parallel
    whole = table.micro_batches % table.pipeline_parallel == 0
    result: Ints = np.where(whole, np.minimum(table.micro_batches, few), table.micro_batches)
    return result


@lru_cache(maxsize=16384)
def moments(
    schedule: Schedule,
    pipeline: int,
    chunks: int,
    micro_batches: int,
    rank: int,
    keeps_whole: bool,
    later: bool,
    frees: bool = False,
) -> Floats:
    """Contents of a rank after the passes that no other pass exceeds in every kind of tensor: [moments,
    `Alive`].

    Args:
        keeps_whole: ranks keep all gradients, and copies of parameters until a stage's last backward pass.
            Otherwise a stage reduces its gradients then, and only the next few stages are gathered.
        later, frees: see `fullest`.
    """
    kind, stage = passes_of_rank(schedule, rank, pipeline, chunks, micro_batches)
    stages = np.array(distinct_numbers(stage))
    own = stage[:, None] == stages
    forward, inputs, weights, whole = (
        own & (kind == each)[:, None] for each in (FORWARD, INPUTS, WEIGHTS, BACKWARD)
    )
    # The first stage of a model has no gradients of inputs: it runs all of backward with those of weights.
    first = stages == 0
    whole = whole | (weights & first)
    inputs, weights = inputs & ~first, weights & ~first
    done = (weights | whole).cumsum(axis=0)
    flights = forward.cumsum(axis=0) - done
    waits = inputs.cumsum(axis=0) - weights.cumsum(axis=0)
    # Passes of a stage that add up what the pass before has left, and those that leave something.
    adds = whole | (inputs if later else weights)
    time = np.arange(1, len(kind) + 1)[:, None]
    last_add = np.maximum.accumulate(np.where(adds, time, 0), axis=0)
    last_weights = np.maximum.accumulate(np.where(weights, time, 0), axis=0)
    fresh = last_weights > last_add
    left = last_weights > np.maximum.accumulate(np.where(whole | inputs, time, 0), axis=0)
    before = np.vstack([np.zeros((1, len(stages)), np.int64), done[:-1]])
    sums = np.maximum.accumulate(whole | (adds & ((before > 0) | (not later))), axis=0)
    finished, was_finished = done == micro_batches, before == micro_batches
    if keeps_whole:
        present = (~was_finished).sum(axis=1)
    else:
        # While a stage reduces, it has what it had just before.
        sums, fresh = (sums & ~finished) | (finished & ~was_finished), fresh & ~finished
        left = left & ~finished
        gathered = ~was_finished
        if frees:
            # Parameters that a backward pass gathers stay for the next forward pass.
            last_forward = np.maximum.accumulate(np.where(forward, time, 0), axis=0)
            gathered &= np.maximum.accumulate(np.where(whole, time, 0), axis=0) > last_forward
        present = np.minimum(gathered.sum(axis=1), GATHERED_STAGES)
    head = stages == pipeline * chunks - 1
    every = (
        flights,
        waits,
        flights[:, head],
        sums,
        sums[:, head],
        sums[:, first],
        fresh,
        left,
        was_finished & (not keeps_whole),
        np.zeros_like(fresh),
    )
    every_moment = np.column_stack([*(each.sum(axis=1) for each in every), present])
    if keeps_whole:
        # Hooks that add up a layer at once do not see these gradients: they are all there at the end.
        ends = (weights & (before > 0)).any(axis=1)
        at_end = every_moment[ends]
        at_end[:, Alive._fields.index("added")] = 1
        every_moment = np.vstack([every_moment, at_end])
    return _outermost(every_moment.astype(np.float64))


def _outermost(every: Floats) -> Floats:
    """Moments that are not exceeded in every kind of tensor by another moment."""
    left, found = every[np.argsort(-every.sum(axis=1), kind="stable")], []
    while len(left):
        # None of those after it has as much of all.
        found.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(found)
