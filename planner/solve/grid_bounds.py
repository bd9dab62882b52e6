"""Lower bounds of time and memory over a grid of layouts, for any recomputation.

Few shapes differ in a layer's time and bytes, so each bound is computed once for each of them. The fullest
pipeline rank of a pair of mesh and chunks decides what must recompute (`planner.solve.memory_bounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.memory.moments import turn_of
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.table import NONE, Bools, Floats, Ints, LayoutTable, distinct_rows
from planner.inputs.choice import Choice
from planner.problem import Problem
from planner.solve.bounds import least_units
from planner.solve.memory_bounds import (
    STEPS,
    FullestRank,
    Recomputation,
    fullest_rank,
    kept_bytes,
    least_bytes,
    recomputation_of_layer,
)
from planner.solve.recompute import recompute_kinds, with_recompute
from planner.space.grid import table_at
from planner.space.open_grid import OpenGrid
from planner.space.rules import RULES

NEVER = 1e100
"""Seconds of an impossible layout: large, but products and sums of it are still finite."""

KNOTS, ALL_BELOW = 1.1, 16
"""The ratio between consecutive priced sizes of microbatches, and the size up to which all sizes are priced.
A sequence takes less time in a larger microbatch."""

SHAPE = (
    "tensor_parallel",
    "context_parallel",
    "context_parallel_form",
    "expert_parallel",
    "expert_tensor_parallel",
)
"""Columns of the pairs of mesh and chunks that, with the schedule, determine a microbatch's time and
bytes."""


@dataclass(frozen=True)
class Units:
    """Lower bounds of a microbatch's time and kept bytes. Arrays are [shapes, sizes, at most 2], except
    `shape`, `again`, `rank` and `possible`."""

    shape: Ints
    """The number of the shape of each pair of mesh and chunks."""
    whole: Floats
    """Seconds on all pipeline ranks together."""
    layer: Floats
    """Seconds in one layer."""
    kept: Floats
    """Bytes that a layer keeps."""
    again: Recomputation
    """Bounds for the recomputation of a layer; arrays of [shapes, at most 2]."""
    rank: FullestRank
    """The fullest rank of each pair."""
    possible: Bools
    """Stages of ZeRO whose model states alone may fit, [pairs, stages]."""

    def take(self, pairs: Ints, places: Ints) -> Units:
        """The bounds of some pairs and sizes, with the axes of a grid."""

        def axes(array: Floats) -> Floats:
            found = array[self.shape[pairs][:, None], places]
            return found.reshape(len(pairs), 1, *found.shape[1:], 1, 1)

        each = {name: axes(getattr(self, name)) for name in ("whole", "layer", "kept")}
        rank = FullestRank(
            **{name: held[pairs].reshape(-1, *(1,) * 5) for name, held in vars(self.rank).items()}
        )
        again = self.again.take(self.shape[pairs])
        return Units(np.arange(len(pairs)), **each, again=again, rank=rank, possible=self.possible[pairs])


@dataclass(frozen=True)
class _PricedSizes:
    """The sizes of microbatches that are priced, for each shape; the other sizes follow from them."""

    size: Ints
    """All sizes, [sizes]."""
    knots: Ints
    """Places of the priced sizes among all of them."""
    places: tuple[Ints, ...]
    """Places of the priced layouts: along the axes of shapes, knots and sequence parallelism."""
    shape: tuple[int, ...]
    """Lengths of these axes."""

    @classmethod
    def of(cls, size: Ints, largest: Ints, splits: int) -> _PricedSizes:
        """The priced sizes up to the one from which the largest size of each shape follows.

        Args:
            largest: the largest size of each shape, [shapes].
            splits: length of the axis of sequence parallelism.
        """
        knots = np.flatnonzero(priced_sizes(size))
        after = np.minimum(np.searchsorted(size[knots], largest, side="left"), len(knots) - 1)
        shape = (len(largest), len(knots), splits)
        able = (np.arange(len(knots)) <= after[:, None])[:, :, None]
        return cls(size, knots, np.nonzero(np.broadcast_to(able, shape)), shape)

    def whole(self, found: Floats) -> Floats:
        """Values of every size, [shapes, sizes, splits], from the least one of a sequence at the neighbouring
        priced sizes."""
        size, priced = self.size, self.size[self.knots]
        before = np.searchsorted(priced, size, side="right") - 1
        behind = np.minimum(before + (priced[before] < size), len(priced) - 1)
        each = np.full(self.shape, np.inf)
        each[self.places] = found
        each /= priced[:, None]
        array: Floats = np.minimum(each[:, before], each[:, behind]) * size[:, None]
        return np.minimum(array, NEVER)


def priced_sizes(size: Ints) -> Bools:
    """Sizes whose shapes are priced: all small ones, and larger ones a tenth apart."""
    place = np.floor(np.log(size) / np.log(KNOTS))
    result: Bools = (size <= ALL_BELOW) | (np.diff(place, prepend=-1.0) > 0) | (size == size.max())
    return result


def units_of(problem: Problem, degrees: OpenGrid, most: Ints) -> Units:
    """The bounds of a grid.

    Args:
        most: sequences of the largest microbatch of each pair, [pairs].
    """
    where = problem.model, problem.cluster, problem.constants
    pairs, _, _, splits, _, zero = degrees.shape
    columns = [*(getattr(degrees, name) for name in SHAPE), degrees.runs(*SPLIT_BACKWARD)]
    first, shape = distinct_rows([np.broadcast_to(column.ravel(), (pairs,)) for column in columns])
    kinds = recompute_kinds(problem.pins, problem.engine)
    # Several layers that start from one input keep less than a layer that does.
    pinned = isinstance(problem.pins.get("recompute"), str) and "recompute_num_layers" not in problem.pins

    def at(places: tuple[Ints, ...], stage: Ints | int = 0) -> LayoutTable:
        """Layouts that recompute as pinned, or nothing, at places along the axes of pairs, sizes and sequence
        parallelism."""
        pair, size, split = (each.astype(np.int32) for each in places)
        same = np.zeros_like(pair)
        where = (pair, same, size, split, same, same + np.asarray(stage, dtype=np.int32))
        table = table_at(degrees, where, problem.precision, problem.pins)
        table = table if pinned else with_recompute(table, NONE, 0)
        return replace(table, global_batch_size=table.micro_batch_size * table.data_parallel)

    # All pairs of a shape have as many devices for the same sequences, and some of them a full pipeline.
    largest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(largest, shape, most)
    priced = _PricedSizes.of(degrees.micro_batch_size.ravel(), largest, splits)
    every = (first[priced.places[0]], priced.knots[priced.places[1]], priced.places[2])
    # Ranks that hold all of their parameters may launch in another way.
    stages = {0, zero - 1} if problem.constants.sharding.plain_whole else {0}
    found = [least_units(*where, at(every, stage)) for stage in sorted(stages)]
    whole, layer = (priced.whole(reduce(np.minimum, each)) for each in zip(*found, strict=True))
    kept = np.zeros(whole.shape)
    bounds = Recomputation.of_nothing(len(first), splits)
    rank, possible = FullestRank.empty(pairs), np.ones((pairs, zero), dtype=np.bool_)
    free = problem.cluster.parts or "layers_per_stage" in problem.pins
    if not free and (kinds or pinned):
        own = problem.constants.for_device(problem.cluster.device)
        kept = priced.whole(kept_bytes(problem.model, own, at(every)))
        kept = np.where(kept < NEVER, kept, 0.0)
        # GEMMs take the least for each sequence in large microbatches, hosts in small ones.
        size = degrees.micro_batch_size
        ends = np.array(sorted({int(size.argmin()), int(size.argmax())}))
        corners = tuple(each.ravel() for each in np.meshgrid(first, ends, np.arange(splits), indexing="ij"))
        each_corner = recomputation_of_layer(*where, at(corners), kinds)
        bounds = each_corner.loosest((len(first), len(ends), splits))
        rank, possible = _ranks(problem, degrees, at)
    return Units(shape, whole, layer, kept, bounds, rank, possible)


def _ranks(problem: Problem, degrees: OpenGrid, at: Callable[..., LayoutTable]) -> tuple[FullestRank, Bools]:
    """The fullest rank of each pair, and the stages of ZeRO whose model states alone may fit, [pairs,
    stages].

    Args:
        at: a function that returns layouts at places along the axes of pairs, sizes and sequence parallelism,
            with a stage of ZeRO.
    """
    where = problem.model, problem.cluster, problem.constants
    pairs, zero = degrees.shape[0], degrees.shape[5]
    none = np.zeros(pairs, dtype=np.int64)
    places = (np.arange(pairs), none + int(degrees.micro_batch_size.argmin()), none)
    rank = fullest_rank(*where, at(places, _most_zero(problem, degrees)))
    held = [sum(least_bytes(*where, at(places, none + stage), rank.layers)) for stage in range(zero)]
    return rank, np.stack(held, axis=1) <= problem.cluster.memory_bytes


def _most_zero(problem: Problem, degrees: OpenGrid) -> Ints:
    """The place of the highest stage of ZeRO that each pair may have, [pairs]."""
    stages = degrees.zero_stage
    pairs = degrees.shape[0]
    if stages.shape[5] == 1:
        return np.zeros(pairs, dtype=np.int64)
    fixed = {name for name, value in problem.pins.items() if not isinstance(value, Choice)}
    lifted = any(rule.is_lifted(fixed) for rule in RULES if rule.name == "zero_pipeline")
    piped = (degrees.pipeline_parallel > 1) & (not lifted)
    legal = np.where(piped & (stages > 1), -1, stages)
    every = np.broadcast_to(legal, (pairs, 1, 1, 1, 1, stages.shape[5])).reshape(pairs, -1)
    result: Ints = every.argmax(axis=1)
    return result


def slowest_rank_seconds(problem: Problem, part: OpenGrid, units: Units, micro_batches: Ints) -> Floats:
    """Lower bound of the seconds of one microbatch on the slowest pipeline rank, with the axes of a grid;
    `NEVER` where nothing fits.

    If chunks are equal up to one layer, the first rank has the most layers, so no rank computes longer.
    """
    chunks, pipeline = part.virtual_pipeline_parallel, part.pipeline_parallel
    most = np.zeros(())
    if "layers_per_stage" not in problem.pins:
        each, rest = np.divmod(problem.model.layers, part.stages)
        most = np.where(chunks > 1, each * chunks - (-rest // pipeline), 0)
    again = recomputation_seconds(problem, part, units, micro_batches)
    mean = units.whole / pipeline + np.where(chunks > 1, 0.0, again)
    slowest: Floats = np.maximum(mean, most * units.layer + again)
    return slowest


def recomputation_seconds(problem: Problem, part: OpenGrid, units: Units, micro_batches: Ints) -> Floats:
    """Least seconds of recomputation of one microbatch with which a pipeline rank fits; `NEVER` where it
    cannot fit."""
    chunks, pipeline, rank = part.virtual_pipeline_parallel, part.pipeline_parallel, units.rank
    flying = np.minimum(rank.in_flight, micro_batches * rank.layers)
    # Without a buffer, gradients are there beside all activations from the microbatch on that follows the
    # warm-up (`costmodels.memory.moments.least_moment`). With chunks, each has them after its first turn.
    turns = part.runs("interleaved") & (micro_batches * chunks - rank.flights > (chunks - 1) * pipeline)
    together = rank.has_buffer | np.where(chunks == 1, micro_batches > pipeline, turns)
    more = micro_batches > turn_of(part)
    states = np.where(more, rank.more_states, rank.states)
    gradients = np.where(more, rank.more_gradients, rank.gradients)
    left = problem.cluster.memory_bytes - states - np.where(together, gradients, 0.0)
    size, axes = part.micro_batch_size, (slice(None), None, None, slice(None), None, None)
    freed, working, busy = (getattr(units.again, name)[axes] for name in ("freed", "working", "busy"))
    # A layer in its backward pass has its activations, kept or computed again, and those of its gradients.
    unfit = np.maximum(flying * units.kept + rank.running * working * size - left, 0.0)
    least = np.maximum(flying - rank.running, 0.0) * (units.kept - freed * size) + rank.running * busy * size
    # Each byte of a layer is there as often as the layer is in flight, which is once for each rank at most.
    often = np.where(chunks > 1, flying, pipeline * rank.layers)
    each = unfit / np.maximum(often, 1e-9) / size
    share = np.minimum(np.where(each > 0, each / np.where(freed > 0, freed, 1e-30), 0.0), 2.0)
    step = np.minimum(share * STEPS, STEPS).astype(np.int64)
    pairs, splits = (each_axis[axes] for each_axis in np.ogrid[: len(freed), : freed.shape[3]])
    seconds = units.again.seconds[pairs, splits, step] * size * rank.layers
    never = (states + gradients > problem.cluster.memory_bytes) | (least > left)
    return np.where(never | (share > 1 + 1e-9), NEVER, seconds)
