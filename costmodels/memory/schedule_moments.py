"""Tensors that a rank with several stages holds together, at each moment of its schedule.

Different tensors are largest at different moments. Gradients are allocated while activations are freed,
weight gradients may come later than input gradients, and stages are gathered and freed. The order of passes
is simulated once for each schedule, pipeline and number of microbatches. The result is a few moments, none of
which is less than another in every kind of tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.ranks.rank_layers import Ranks, layers_by_kind
from costmodels.spec.layout import SPLIT_BACKWARD, Schedule
from costmodels.spec.schedules import (
    BACKWARD,
    FORWARD,
    GATHERED_STAGES,
    INPUTS,
    WEIGHTS,
    passes_of_rank,
)
from costmodels.spec.table import (
    BLOCK,
    FULL,
    NONE,
    SCHEDULES,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    combined_key,
    distinct_numbers,
)

ROUNDS, SPLIT_ROUNDS = 3, 4
"""Number of rounds of microbatches after which a step only repeats itself: with whole backward passes, and
with split ones."""


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
    gathers: Floats
    """1 where parameters of a stage are gathered between two passes."""


def played(table: LayoutTable, ranks: Ranks) -> Bools:
    """The ranks whose fullest moment is found here, [n, k]."""
    result: Bools = (table.virtual_pipeline_parallel > 1)[:, None] & (ranks.place > 0)
    return result


def fullest(
    table: LayoutTable, ranks: Ranks, sizes: Alive, kept: Sequence[Floats], later: Bools, frees: Bools
) -> Alive:
    """Contents of each rank at its fullest moment, [n, k]; zero for ranks that are not `played`.

    Of unequal stages, those that keep more count as more than one unit of `flights`.

    Args:
        sizes: bytes of one unit of each; of `flights`, what the mean stage keeps of one microbatch.
        kept: bytes that a layer of each of `LAYER_KINDS` keeps of one microbatch, [n] each.
        later: rows whose 16-bit gradients wait until their stage's next backward pass adds them.
        frees: rows that free a stage's parameters after each forward pass.
    """
    rows, columns = np.nonzero(played(table, ranks))
    found = np.zeros((len(Alive._fields), *ranks.place.shape))
    fields: list[Ints | Bools] = [
        table.schedule[rows],
        table.pipeline_parallel[rows],
        table.virtual_pipeline_parallel[rows],
        few_micro_batches(table)[rows],
        ranks.place[rows, columns].astype(np.int64) - 1,
        table.keeps_whole[rows],
        later[rows],
        frees[rows],
    ]
    unequal = _unequal(table)
    differs = bool(unequal.any())
    if differs:
        fields += [(unequal * (1 + column))[rows] for column in _stage_columns(table)]
    key = combined_key(fields)
    order = np.argsort(key, kind="stable")
    rows, columns, key = rows[order], columns[order], key[order]
    each = np.stack([np.broadcast_to(size, ranks.place.shape)[rows, columns] for size in sizes])
    of_layer = np.stack([bytes_[rows] for bytes_ in kept]) if differs else np.zeros(0)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(key)) + 1, [len(key)]])
    firsts = zip(*(field[order[starts[:-1]]].tolist() for field in fields), strict=True) if len(key) else ()
    most = np.empty((len(key), len(Alive._fields)))
    for start, end, (schedule, *rest) in zip(starts[:-1].tolist(), starts[1:].tolist(), firsts, strict=False):
        own, units = rest[:MOMENT_FIELDS], each[:, start:end]
        if any(rest[MOMENT_FIELDS:]):
            split, block, together = (column - 1 for column in rest[MOMENT_FIELDS:])
            dense = round(float(ranks.all_dense[rows[start], columns[start]]))
            stages = table.splits[split], dense, block or None, together
            every, more = unequal_moments((SCHEDULES[schedule], *own), stages)
            beyond = more @ of_layer[:, start:end]
            chosen = (every @ units + beyond).argmax(axis=0)
            most[start:end] = every[chosen]
            most[start:end, 0] += beyond[chosen, np.arange(end - start)] / units[0]
            continue
        every = moments(SCHEDULES[schedule], *own)
        most[start:end] = every[(every @ units).argmax(axis=0)] if len(every) > 1 else every
    found[:, rows, columns] = most.T
    return Alive(*found)


MOMENT_FIELDS = 7
"""Number of fields of a group, besides the schedule, that `moments` depends on."""


def _unequal(table: LayoutTable) -> Bools:
    """Rows whose stages have different numbers of layers."""
    differ = np.array([len(set(split)) > 1 for split in table.splits], dtype=np.bool_)
    result: Bools = differ[table.split]
    return result


def _stage_columns(table: LayoutTable) -> tuple[Ints, Ints, Ints]:
    """Columns that decide what the layers of a stage keep: the split, the layers of a stage that recompute (0
    for all), and the layers that share a kept input, [n]."""
    block = (table.recompute != NONE) & (table.recompute_method == BLOCK)
    shares = (table.recompute == FULL) & ~block
    return (
        table.split,
        np.where(block, table.recompute_num_layers, 0),
        np.where(shares, table.recompute_num_layers, 1),
    )


Stages = tuple[tuple[int, ...], int, int | None, int]
"""Layers of each stage of the model, layers of a rank with a dense MLP, layers of each stage that recompute
if others do not, and layers that share one kept input."""


Group = tuple[Schedule, int, int, int, int, bool, bool, bool]
"""The arguments of `moments` without `by_stage`."""


@lru_cache(maxsize=16384)
def unequal_moments(group: Group, stages: Stages) -> tuple[Floats, Floats]:
    """Moments as those of `moments`, and the layers that they keep beyond the mean stage's, [moments,
    `LAYER_KINDS`]."""
    schedule, pipeline, chunks, micro_batches, rank, *_ = group
    every = moments(*group, by_stage=True)
    every, *of_stages = np.split(every, range(len(Alive._fields), every.shape[1], chunks), axis=1)
    # Other rows share the moments in the cache.
    every = every.copy()
    split, dense, block, together = stages
    own = distinct_numbers(passes_of_rank(schedule, rank, pipeline, chunks, micro_batches)[1])
    sizes = np.array([split[stage] for stage in own])
    again_dense, again_moe, *plain = layers_by_kind(
        sizes, np.clip(dense - (np.cumsum(sizes) - sizes), 0, sizes), block
    )
    # Layers that share one kept input count as one.
    layers = np.column_stack([-(-again_dense // together), -(-again_moe // together), *plain])
    for name, held in zip(("sums", "fresh"), of_stages[1:], strict=False):
        every[:, Alive._fields.index(name)] = held @ (sizes / sizes.mean())
    return every, of_stages[0] @ (layers - layers.mean(axis=0))


def few_micro_batches(table: LayoutTable) -> Ints:
    """The fewest microbatches that give the same set of moments, [n]."""
    few = np.where(table.runs(*SPLIT_BACKWARD), SPLIT_ROUNDS, ROUNDS) * table.pipeline_parallel
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
    by_stage: bool = False,
) -> Floats:
    """Contents of a rank after the passes that no other pass exceeds in every kind of tensor: [moments,
    `Alive`]. With `by_stage` the flights of each stage follow, and sums and fresh gradients where only some
    stages have them.

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
    head = stages == pipeline * chunks - 1
    # Passes of weight gradients after the loss add up too, but what the pass before them has left.
    sums = whole | ((adds | (weights & head)) & ((before > 0) | (not later)))
    sums = np.maximum.accumulate(sums, axis=0)
    finished, was_finished = done == micro_batches, before == micro_batches
    if keeps_whole:
        present = (~was_finished).sum(axis=1)
    else:
        # While a stage reduces, it has what it had just before.
        sums = (sums & ~finished) | (finished & ~was_finished)
        fresh = fresh & ~(was_finished | (finished & ~head))
        left = left & ~finished
        gathered = ~was_finished
        if frees:
            # Parameters that a backward pass gathers stay for the next forward pass.
            last_forward = np.maximum.accumulate(np.where(forward, time, 0), axis=0)
            gathered &= np.maximum.accumulate(np.where(whole, time, 0), axis=0) > last_forward
        present = np.minimum(gathered.sum(axis=1), GATHERED_STAGES)
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
    of_stages = (flights, sums, fresh)[: 0 if not by_stage else 3 if micro_batches <= pipeline else 1]
    none = np.zeros(len(kind))
    every_moment = np.column_stack([*(each.sum(axis=1) for each in every), present, none, *of_stages])
    if keeps_whole:
        # Hooks that add up a layer at once do not see these gradients: they are all there at the end.
        ends = (weights & (before > 0)).any(axis=1)
        at_end = every_moment[ends]
        at_end[:, Alive._fields.index("added")] = 1
        every_moment = np.vstack([every_moment, at_end])
    elif not frees:
        before_pass = every_moment[_gathers_after(own)]
        before_pass[:, Alive._fields.index("gathers")] = 1
        every_moment = np.vstack([every_moment, before_pass])
    found = _outermost(every_moment.astype(np.float64))
    found.setflags(write=False)
    return found


def _gathers_after(own: Bools) -> Bools:
    """The passes after which a rank gathers a stage, as it keeps the parameters of the next few stages.

    Args:
        own: True where a pass is of a stage, [passes, stages].
    """
    passes, stages = own.shape
    if stages <= GATHERED_STAGES:
        return np.zeros(passes, dtype=np.bool_)
    place = np.where(own, np.arange(passes)[:, None], passes)
    next_use = np.minimum.accumulate(place[::-1], axis=0)[::-1]
    last = np.partition(next_use, GATHERED_STAGES - 1, axis=1)[:, GATHERED_STAGES - 1 : GATHERED_STAGES]
    gathered = next_use <= np.minimum(last, passes - 1)
    result: Bools = np.append((gathered[1:] & ~gathered[:-1]).any(axis=1), False)
    return result


def _outermost(every: Floats) -> Floats:
    """Moments that are not exceeded in every kind of tensor by another moment."""
    left, found = every[np.argsort(-every.sum(axis=1), kind="stable")], []
    while len(left):
        # None of those after it has as much of all.
        found.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(found)
