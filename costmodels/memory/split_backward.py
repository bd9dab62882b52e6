"""What is alive together on a rank whose backward passes are split, moment by moment of its schedule.

Gradients of weights come later than those of inputs, so that at no moment is everything at its most. The order
of passes is run through once for each schedule, pipeline and number of micro batches; what is left of it is a
few moments of which none holds less of everything than another.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.layout import SPLIT_BACKWARD, Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, passes_of_rank, schedule_exists
from costmodels.spec.table import SCHEDULES, Bools, Floats, Ints, LayoutTable, combined_key

ROUNDS = 4
"""Rounds of micro batches after which a step only repeats itself."""


class Alive(NamedTuple):
    """What a rank has at its fullest moment, in units of one stage; [n, k] each."""

    flights: Floats
    """Micro batches between forward and the end of backward, over all stages."""
    waits: Floats
    """Those of them whose gradients of weights are still to come."""
    head_flights: Floats
    """As `flights`, of the last stage of the model."""
    sums: Floats
    """Stages that have summed gradients."""
    fresh: Floats
    """Stages that have gradients in 16 bits beside their sums."""


Sizes = Alive
"""Bytes of one of each of what `Alive` counts; [n, k] each."""


def places(table: LayoutTable, ranks: Ranks) -> Ints:
    """The place in the pipeline of ranks that split backward, by what they have to do later, [n, k]; -1 for
    others."""
    chunks = table.virtual_pipeline_parallel[:, None]
    behind = np.rint(ranks.backlog / np.maximum(np.ceil(ranks.layers / chunks - 1e-9), 1.0))
    place = np.where(table.runs("zbv")[:, None], (behind - 1) // 2, behind - 1)
    able = table.runs(*SPLIT_BACKWARD)[:, None] & (behind > 0)
    result: Ints = np.where(able, np.minimum(place, table.pipeline_parallel[:, None] - 1), -1).astype(np.int64)
    return result


def fullest(table: LayoutTable, place: Ints, sizes: Sizes, later: Bools) -> Alive:
    """What ranks have together at the moment that is the fullest, [n, k]; zero where `place` is negative.

    Args:
        place: their places in the pipeline, as `places` has them.
        sizes: bytes of one of each.
        later: rows whose gradients in 16 bits wait until the next backward pass of their stage adds them up.
    """
    found = np.zeros((len(Alive._fields), *place.shape))
    rows, columns = np.nonzero(place >= 0)
    key = combined_key(
        [
            table.schedule[rows],
            table.pipeline_parallel[rows],
            table.virtual_pipeline_parallel[rows],
            table.micro_batches[rows],
            place[rows, columns],
            table.keeps_whole[rows],
            later[rows],
        ]
    )
    each = np.stack([np.broadcast_to(size, place.shape)[rows, columns] for size in sizes])
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order])) + 1
    for same in np.split(order, ends) if len(order) else ():
        row = int(rows[same[0]])
        every = moments(
            SCHEDULES[int(table.schedule[row])],
            int(table.pipeline_parallel[row]),
            int(table.virtual_pipeline_parallel[row]),
            int(table.micro_batches[row]),
            int(place[row, columns[same[0]]]),
            bool(table.keeps_whole[row]),
            bool(later[row]),
        )
        most = (every @ each[:, same]).argmax(axis=0)
        found[:, rows[same], columns[same]] = every[most].T
    return Alive(*found)


def few_micro_batches(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> int:
    """The fewest micro batches whose step passes through the same moments."""
    fewer = micro_batches % pipeline + ROUNDS * pipeline
    known = fewer < micro_batches and schedule_exists(schedule, pipeline, chunks, fewer)
    return fewer if known else micro_batches


def moments(
    schedule: Schedule,
    pipeline: int,
    chunks: int,
    micro_batches: int,
    rank: int,
    keeps_whole: bool,
    later: bool,
) -> Floats:
    """What a rank has after each of its passes, as far as no other moment has more of all, [moments, 5].

    Args:
        keeps_whole: all ranks hold all gradients; otherwise a stage reduces its own after its last pass.
        later: see `fullest`.
    """
    fewer = few_micro_batches(schedule, pipeline, chunks, micro_batches)
    return _moments(schedule, pipeline, chunks, fewer, rank, keeps_whole, later)


@lru_cache(maxsize=8192)
def _moments(
    schedule: Schedule,
    pipeline: int,
    chunks: int,
    micro_batches: int,
    rank: int,
    keeps_whole: bool,
    later: bool,
) -> Floats:
    kind, stage = passes_of_rank(schedule, rank, pipeline, chunks, micro_batches)
    stages = np.unique(stage)
    own = stage[:, None] == stages
    forward, inputs, weights, whole = (own & (kind == each)[:, None] for each in (FORWARD, INPUTS, WEIGHTS, BACKWARD))
    # The first stage of a model has no gradients of inputs: it runs all of backward with those of weights.
    first = stages == 0
    whole = whole | (weights & first)
    inputs, weights = inputs & ~first, weights & ~first
    ends = weights | whole
    done = ends.cumsum(axis=0)
    flights = forward.cumsum(axis=0) - done
    waits = inputs.cumsum(axis=0) - weights.cumsum(axis=0)
    # Passes of a stage that add up what the pass before has left, and those that leave it.
    adds = whole | (inputs if later else weights)
    time = np.arange(1, len(kind) + 1)[:, None]
    last_add = np.maximum.accumulate(np.where(adds, time, 0), axis=0)
    last_fresh = np.maximum.accumulate(np.where(weights, time, 0), axis=0)
    fresh = last_fresh > last_add
    added = np.maximum.accumulate(adds & ((waits > 0) | (done > 0) | whole), axis=0)
    before = np.vstack([np.zeros((1, len(stages)), np.int64), done[:-1]])
    sums = np.maximum.accumulate(whole | (adds & (before > 0)), axis=0) if later else added
    finished = done == micro_batches
    if not keeps_whole:
        sums, fresh = sums & ~finished, fresh & ~finished
        # While a stage reduces, it has what it had just before.
        sums = sums | (finished & ~(before == micro_batches))
    head = stages == pipeline * chunks - 1
    every = np.column_stack(
        [
            flights.sum(axis=1),
            waits.sum(axis=1),
            flights[:, head].sum(axis=1),
            sums.sum(axis=1),
            fresh.sum(axis=1),
        ]
    ).astype(np.float64)
    return _outermost(every)


def _outermost(every: Floats) -> Floats:
    """Moments that have more of something than each other one."""
    every = np.unique(every, axis=0)[::-1]
    covered = (every[:, None] <= every[None]).all(axis=2)
    np.fill_diagonal(covered, False)
    return np.ascontiguousarray(every[~covered.any(axis=1)])
