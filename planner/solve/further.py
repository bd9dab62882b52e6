"""Layouts beyond the enumerated ones that could be among the first: other microbatches, unequal chunks, and
experts whose weights are split although there are enough experts.

Under a maximum batch any microbatch is legal, and any number of them. Enumerating them all would take many
times longer, and few are good. A lower bound of each time is cheap, as it depends on a few shapes only.
Layouts whose bound is below the last of the first places are searched like any other. No layout that is left
out could be among the first.

For each size of a microbatch, a step has as many as the batch holds, as tokens per second grow with their
number. Memory grows too, from one microbatch to two, or from one round of interleaved chunks to two. So fewer
microbatches can make a layout fit (`planner.solve.recompute.with_fewest_micro_batches`). Where pins fix the
recomputation, nothing is solved, and steps of the fewest microbatches are listed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Literal

import numpy as np

from costmodels.pricing import peak_memory
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES
from costmodels.spec.table import NONE, Bools, Floats, Ints, distinct_rows
from planner.inputs.choice import Choice
from planner.objective import slowness
from planner.problem import Problem
from planner.solve.bounds import Worth, least_step_seconds, least_units
from planner.solve.fit import Fit
from planner.solve.grid_bounds import NEVER, SHAPE, Units, priced_sizes, slowest_rank_seconds, units_of
from planner.solve.recompute import recompute_kinds, with_most_recompute
from planner.space.grid import MicroBatches, Space, micro_batch_sizes, table_at
from planner.space.open_grid import OpenGrid
from planner.space.rule import Rule
from planner.space.rules import LONGEST_CHUNK, RULES

AT_ONCE = 1 << 21
"""Most elements of one intermediate array."""

EVERY, FINE = 512, 1.005
"""All sizes of microbatches up to the first number are examined; beyond it, each size is the last one times
the second number."""

MANY = 256
"""Number of sizes of microbatches above which sizes that are too large for any device are removed first."""

RESERVE = [rule for rule in RULES if rule.reserve]

(UNEQUAL_CHUNKS,) = (rule for rule in RESERVE if rule.name == "virtual_pipeline_chunks")


Which = Literal["small", "usual", "fewest", "other"]
"""Sizes of microbatches to examine. One choice is the smallest only, because larger ones do not fit if it
does not. Others are the enumerated sizes with layouts that break rules in reserve, any size in steps of the
fewest microbatches, and other sizes."""


def further_space(problem: Problem, space: Space, found: Fit, worth: Worth, which: Which) -> Space | None:
    """Layouts that could be worth it and that `space` does not list; None where there are none.

    Args:
        space: the enumerated layouts.
        found: the enumerated layouts that fit.
    """
    if problem.objective == "memory" and which != "small":
        return None  # The layouts that hold least are enumerated.
    micro_batches = _micro_batches(problem, space, found, which)
    if not len(micro_batches.size):
        return None
    listed = problem
    if lists_plain_alone(problem):
        listed = replace(problem, pins={**problem.pins, "recompute": "none"})
    every = listed.further_space(
        micro_batches, partial(_admitted, problem, worth, () if space.has_reserve else RESERVE)
    )
    return every if len(every.table) else None


def lists_plain_alone(problem: Problem) -> bool:
    """Return whether the layouts that `further_space` lists recompute nothing; their recomputation is solved
    later."""
    return "none" in recompute_kinds(problem.pins, problem.engine)


def _micro_batches(problem: Problem, space: Space, found: Fit, which: Which) -> MicroBatches:
    """Sizes of microbatches, and a mark for steps of the fewest microbatches."""
    usual = np.array(micro_batch_sizes(problem.batch, problem.pins), dtype=np.int64)
    if which == "small":
        # Fewer microbatches hold no more.
        sizes = usual[:1]
        return MicroBatches(sizes, np.full(len(sizes), problem.batch.maximum))
    if which == "usual":
        return MicroBatches(usual, np.zeros(len(usual), dtype=np.bool_))
    pin = problem.pins.get("micro_batch_size")
    free = problem.has_open_batch
    fewest = which == "fewest"
    if not free or (fewest and recompute_kinds(problem.pins, problem.engine)):
        return MicroBatches(usual[:0], np.zeros(0, dtype=np.bool_))
    if not (pin is None or isinstance(pin, Choice)):
        sizes = usual if fewest else usual[:0]
        return MicroBatches(sizes, np.full(len(sizes), fewest))
    largest = problem.batch.size if fewest else _largest(problem, space, found, usual)
    sizes = np.arange(1, 1 + largest, dtype=np.int64)
    if isinstance(pin, Choice):
        sizes = sizes[[size in pin for size in sizes.tolist()]]
    apart = np.floor(np.log(sizes) / np.log(FINE))
    known = np.isin(sizes, usual)
    some = (sizes <= EVERY) | (np.diff(apart, prepend=-1.0) > 0)
    sizes = sizes[some | known if fewest else some & ~known]
    return MicroBatches(sizes, np.full(len(sizes), fewest))


def _largest(problem: Problem, space: Space, found: Fit, usual: Ints) -> int:
    """An upper bound of the sequences of a microbatch that fits."""
    most, table = problem.batch.size, space.table
    if most <= MANY:
        return most
    sizes = table.column("micro_batch_size", np.flatnonzero(found.rows))
    kinds = recompute_kinds(problem.pins, problem.engine)
    where = problem.model, problem.cluster, problem.constants
    plain = np.flatnonzero(found.states & ~found.rows) if kinds else np.zeros(0, dtype=np.int64)
    plain = plain[table.column("recompute", plain) == NONE]
    of_plain = table.column("micro_batch_size", plain)
    for size in usual[usual > sizes.max(initial=0)].tolist():
        rows = plain[of_plain == size]
        held = peak_memory(
            *where, with_most_recompute(problem.model, problem.engine, table.take(rows), kinds)
        )
        if not (held <= problem.cluster.memory_bytes).any():
            # The fewest microbatches hold no less than half of the bytes of the most.
            return min(most, 2 * int(size))
    return most


def _admitted(
    problem: Problem, worth: Worth, reserve: Sequence[Rule], degrees: OpenGrid
) -> tuple[OpenGrid, Bools]:
    """The part of a grid that could be worth it, with masks of its new layouts and of its enumerated layouts.

    Args:
        reserve: the rules that held layouts back when they were enumerated.
    """
    size, most = degrees.micro_batch_size.ravel(), _most_sequences(problem, degrees)
    new = ~_listed(problem, reserve, degrees, degrees.columns["fewest"][:, :, :1])[:, 0, 0, 0, 0, 0]
    unusual = ~np.isin(size, micro_batch_sizes(problem.batch, problem.pins))
    least = size[unusual].min(initial=np.iinfo(np.int64).max)
    wanted = np.flatnonzero((most >= np.where(new, size.min(), least)) & ~_is_covered(problem, degrees))
    degrees, most = degrees.map(lambda array: _taken(array, wanted, np.arange(len(size)))), most[wanted]
    if np.isfinite(worth.last) and len(wanted):
        some = np.flatnonzero(_least_pace(problem, degrees) <= worth.last)
        degrees, most = degrees.map(lambda array: _taken(array, some, np.arange(len(size)))), most[some]
    if not len(most):
        return degrees, np.zeros((0, 1, len(size), 1, 1, 1), dtype=np.bool_)
    units = units_of(problem, degrees, most)
    most = _most_worth(problem, degrees, worth, units, most)
    kept, places = np.flatnonzero(most >= size.min()), np.flatnonzero(size <= most.max())
    part = degrees.map(lambda array: _taken(array, kept, places))
    admitted = np.zeros((len(kept), 1, len(places), degrees.shape[3], 1, 1), dtype=np.bool_)
    with_fewer = problem.has_open_batch and bool(recompute_kinds(problem.pins, problem.engine))
    # Pairs that can have as large microbatches are looked at together.
    order = np.argsort(most[kept], kind="stable")
    start = 0
    while start < len(order):
        low = most[kept[order[start]]]
        end = start + max(1, AT_ONCE // (np.count_nonzero(size <= low) * degrees.shape[3]))
        end = min(end, start + int(np.searchsorted(most[kept[order[start:]]], 2 * low, side="right")))
        rows, start = order[start:end], end
        few = np.arange(np.count_nonzero(size[places] <= most[kept[rows[-1]]]))
        some_part = part.map(partial(_taken, rows=rows, places=few))
        own = units.take(kept[rows], places[few])
        good = _could_be(problem, worth, some_part, own)
        if with_fewer:
            # The row is a base of the same layout with fewer microbatches, which may fit where it does not.
            fewest = OpenGrid.on({**some_part.columns, "fewest": np.ones((1,) * 6, dtype=np.bool_)})
            turns = (some_part.pipeline_parallel == 1) | some_part.runs("interleaved")
            good = good | (turns & _could_be(problem, worth, fewest, own))
        good = good & ~_listed(problem, reserve, some_part, _has_fewer(some_part))
        admitted[rows[:, None], 0, few] = good[:, 0]
    return part, admitted & units.possible[kept][:, None, None, None, None, :]


def _could_be(problem: Problem, worth: Worth, part: OpenGrid, units: Units) -> Bools:
    """Layouts of a grid that could be worth it and could fit, by their lower bounds."""
    full = np.where(part.runs(*V_SCHEDULES), 2, 1) * part.pipeline_parallel
    slowest = slowest_rank_seconds(problem, part, units, part.micro_batches)
    seconds = least_step_seconds(part, units.whole, slowest)
    good: Bools = slowness(problem.objective, part.global_batch_size, seconds) <= worth.last
    return good & (part.micro_batches >= full) & (slowest < NEVER)


def _least_pace(problem: Problem, degrees: OpenGrid) -> Floats:
    """Lower bound of the seconds of a sequence for each pair, or of a step where the objective is about
    steps, [pairs]. Each pipeline rank computes its share of the largest microbatches, whose sequences take
    the least time."""
    pairs, _, sizes, splits, _, zero = degrees.shape
    columns = [*(getattr(degrees, name) for name in SHAPE), degrees.runs(*SPLIT_BACKWARD)]
    first, shape = distinct_rows([np.broadcast_to(column.ravel(), (pairs,)) for column in columns])
    ends = sorted({0, sizes - 1})
    grid = np.meshgrid(first, ends, np.arange(splits), sorted({0, zero - 1}), indexing="ij")
    pair, size, split, stage = (each.ravel().astype(np.int32) for each in grid)
    same = np.zeros_like(pair)
    table = table_at(degrees, (pair, same, size, split, same, stage), problem.precision, problem.pins)
    table = replace(table, global_batch_size=table.micro_batch_size * table.data_parallel)
    whole, _ = least_units(problem.model, problem.cluster, problem.constants, table)
    each = (whole / table.micro_batch_size).reshape(len(first), -1).min(axis=1)[shape]
    devices = degrees.pipeline_parallel * degrees.data_parallel
    pace: Floats = each / np.broadcast_to(devices.ravel(), (pairs,))
    return pace * (1 if problem.objective != "step-time" else degrees.data_parallel.ravel())


def _most_worth(problem: Problem, degrees: OpenGrid, worth: Worth, units: Units, most: Ints) -> Ints:
    """Sequences of the largest microbatch of each pair that could be worth it, found from `KNOTS` only,
    [pairs]."""
    pairs, _, _, splits, _, _ = degrees.shape
    size = degrees.micro_batch_size.ravel()
    knots = np.flatnonzero(priced_sizes(size))
    largest = np.zeros(pairs, dtype=np.int64)
    upper = np.append(size[knots][1:] - 1, size.max())
    block = max(1, AT_ONCE // (len(knots) * splits))
    for start in range(0, pairs, block):
        rows = np.arange(start, min(start + block, pairs))
        part = degrees.map(partial(_taken, rows=rows, places=knots))
        full = np.where(part.runs(*V_SCHEDULES), 2, 1) * part.pipeline_parallel
        slowest = slowest_rank_seconds(problem, part, units.take(rows, knots), full)
        if problem.objective == "step-time":
            pace = slowest * full
        else:
            pace = slowest / part.micro_batch_size / part.data_parallel
        good = ((pace <= worth.last) & (slowest < NEVER)).any(axis=(1, 3, 4, 5))
        largest[rows] = np.where(good, upper, 0).max(axis=1)
    return np.minimum(largest, most)


def _taken(array: Ints | Bools, rows: Ints, places: Ints) -> Ints | Bools:
    """A grid of some of the pairs of mesh and chunks, and some of the microbatches."""
    for axis, some in ((0, rows), (2, places)):
        array = array.take(some, axis=axis) if array.shape[axis] > 1 else array
    return array


def _most_sequences(problem: Problem, degrees: OpenGrid) -> Ints:
    """Most sequences of a microbatch with which the batch still fills the pipeline of each pair, [pairs]."""
    least = degrees.pipeline_parallel * np.where(degrees.runs(*V_SCHEDULES), 2, 1) * degrees.data_parallel
    most: Ints = np.broadcast_to(problem.batch.size // least, (degrees.shape[0], 1, 1, 1, 1, 1)).ravel()
    return most


def _listed(problem: Problem, reserve: Sequence[Rule], degrees: OpenGrid, fewest: Ints | Bools) -> Bools:
    """Mask of the layouts that are enumerated."""
    fixed = {name for name, value in problem.pins.items() if not isinstance(value, Choice)}
    held_back = reduce(
        np.logical_or,
        [rule.broken(problem.model, degrees) for rule in reserve if not rule.is_lifted(fixed)],
        np.zeros((1,) * 6, dtype=np.bool_),
    )
    usual = np.isin(degrees.micro_batch_size, micro_batch_sizes(problem.batch, problem.pins))
    result: Bools = ~held_back & usual[:, :, : fewest.shape[2]] & (fewest == 0)
    return result


def _has_fewer(degrees: OpenGrid) -> Ints | Bools:
    """Mask of the layouts whose steps have fewer microbatches than the batch holds."""
    fewest = degrees.columns["fewest"]
    if not fewest.any():
        return fewest
    most = OpenGrid.on({**degrees.columns, "fewest": np.zeros_like(fewest)})
    result: Bools = degrees.global_batch_size < most.global_batch_size
    return result


def _is_covered(problem: Problem, degrees: OpenGrid) -> Bools:
    """Pairs of mesh and chunks whose pipeline also runs a similar number of equal chunks, [pairs]."""
    unequal = UNEQUAL_CHUNKS.broken(problem.model, degrees)
    covered = unequal & ~degrees.runs("1f1b", *V_SCHEDULES) & _has_near_chunks(problem, degrees)
    return np.broadcast_to(covered.ravel(), (degrees.shape[0],)) & (
        "virtual_pipeline_parallel" not in problem.pins
    )


def _has_near_chunks(problem: Problem, degrees: OpenGrid) -> Bools:
    """Pairs whose pipeline also runs equal chunks, in half to twice the number.

    Only the bubble and the messages differ, and they lie between those of equal chunks.
    """
    columns = np.broadcast_arrays(degrees.pipeline_parallel, degrees.virtual_pipeline_parallel)
    # Many pairs have the same pipeline.
    first, place = distinct_rows([column.ravel() for column in columns])
    pipeline, chunks = (column.ravel()[first] for column in columns)
    other = np.arange(2, max(1, problem.model.layers // 2) + 1)[:, None]
    stages = pipeline * other
    equal = -(-problem.model.layers // stages) * stages <= LONGEST_CHUNK * problem.model.layers
    near = equal & (2 * other >= chunks) & (other <= 2 * chunks)
    result: Bools = np.logical_or.reduce(near, axis=0)[place].reshape(columns[0].shape)
    return result
