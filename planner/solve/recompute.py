"""The least recomputation that fits, solved for layouts that do not fit without it.

Recomputing more layers of a stage takes longer and keeps fewer bytes. So for one set of modules, the fewest
layers that fit are the fastest. Bisection finds them for every set of modules and for whole layers; the
fastest result is the answer. With offloaded activations, layers that recompute also move fewer bytes. There
either the fewest layers that fit or all layers are the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import combinations

import numpy as np

from costmodels.pricing import Prices, peak_memory, price, step_time
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Recompute
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import (
    BLOCK,
    FULL,
    NONE,
    RECOMPUTE_MODULES,
    SELECTIVE,
    UNIFORM,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    code_of,
)
from planner.inputs.choice import Choice
from planner.inputs.pins import Pins
from planner.objective import slowness
from planner.solve.bounds import Floor, Worth, in_rounds, rows_worth
from planner.solve.concatenation import concatenate_prices
from planner.solve.fit import Fit
from planner.space.grid import Space

MODULE_SETS: tuple[int, ...] = tuple(
    code_of("recompute_modules", modules)
    for size in range(1, len(RECOMPUTE_MODULES) + 1)
    for modules in combinations(RECOMPUTE_MODULES, size)
    # The MLP has the activation function in it.
    if not {"mlp", "activation"} <= set(modules)
)
"""Bits of the modules of selective recomputation, few modules first."""

MOST_MODULES = code_of("recompute_modules", ("core_attention", "mlp", "norm"))
"""The set of modules with which selective recomputation keeps the fewest bytes."""

USUAL = code_of("recompute_modules", ("core_attention",))
"""The modules of enumerated layouts."""


ROUND = 1024
"""Rows whose recomputation is solved in the first round."""

NEAR = 1.02
"""Peak, as a share of a device's memory, up to which other modules are tried where the most recomputation
does not fit."""


def least_recompute(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    space: Space,
    found: Fit,
    kinds: Collection[Recompute],
    worth: Worth,
    floor: Floor,
    plain_alone: bool = False,
    fewer: bool = False,
) -> Prices | None:
    """Layouts that fit because a part of their modules or layers recomputes, at most one of each family.

    Args:
        space: every legal layout, where recomputation is none, selective (core attention) or full.
        found: the layouts that fit.
        kinds: kinds of recomputation that the pins leave.
        worth: test of families; only those that could be worth it are solved.
        floor: lower bounds of slowness for the layouts of the space.
        plain_alone: the space lists only layouts without recomputation.
        fewer: a step may have fewer microbatches.
    """
    table = space.table
    # With activations moved to the host, layouts that fit may be faster where they recompute instead.
    bases = np.flatnonzero(found.states & (~found.rows | table.offload_activations))
    bases = bases[table.column("recompute", bases) == NONE]
    if not len(bases) or not {"selective", "full"} & set(kinds):
        return None
    plain = table.take(rows_worth(model, cluster, engine, table, bases, worth, floor))
    # Enumerated layouts have the most microbatches.
    groups = [(plain, plain_alone, False)]
    if fewer:
        groups.append((with_fewest_micro_batches(plain), True, True))
    priced: list[Prices] = []
    for some, usual, new in groups:
        # Memory is priced of rows that are fast enough alone.
        seconds = step_time(model, cluster, engine, some)
        kept = np.flatnonzero(worth(some, seconds) | some.offload_activations)
        some, seconds = some.take(kept), seconds[kept]
        solved = some
        if new:
            fit = worth(some, seconds) & (_peak(model, cluster, engine, some) <= cluster.memory_bytes)
            priced.append(price(model, cluster, engine, some.take(fit)))
            unfit = some.offload_activations | ~fit
            solved, seconds = some.take(unfit), seconds[unfit]
        possible = _could_fit(model, cluster, engine, solved, kinds)
        solved, seconds = solved.take(possible), seconds[possible]
        # Layers that recompute move fewer bytes to the host.
        least = np.where(solved.offload_activations, 0.0, seconds)
        pace = slowness(worth.objective, solved.global_batch_size, least)

        def solve(rows: Ints, _: Worth, plain: LayoutTable = solved, usual: bool = usual) -> Prices:
            return fastest_that_fit(model, cluster, engine, plain.take(rows), kinds, usual)[1]

        found_now = in_rounds(pace, worth, ROUND, solve)
        priced += found_now
        worth = worth.beside(found_now)
    return concatenate_prices(priced) if priced else None


def _could_fit(
    model: ModelSpec, cluster: Cluster, engine: Engine, plain: LayoutTable, kinds: Collection[Recompute]
) -> Bools:
    """Rows that may fit with some recomputation, [n].

    Whole layers, or all modules, keep the fewest bytes. But their recomputed activations exist at once, so
    small models may fit only with other modules.
    """
    held = _peak(model, cluster, engine, with_most_recompute(model, engine, plain, kinds))
    result: Bools = held <= NEAR * cluster.memory_bytes
    return result


def _kinds_of_some_layers(engine: Engine) -> list[int]:
    """The kinds of recomputation that the engine does in a part of the layers of a stage."""
    return [code_of("recompute", one) for one in engine.runs.recompute_some_layers]


def _peak_of_all_but_one(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    plain: LayoutTable,
    kind: Ints | int,
    modules: Ints | int,
) -> Floats:
    """Bytes of rows where the last layer of a stage keeps the activations that the others recompute, [n].

    The last layer's recomputed activations exist beside the loss, so keeping them may lower the peak.
    """
    deepest = plain.deepest
    some = with_recompute(plain, kind, modules, np.maximum(deepest - 1, 1))
    return np.where(deepest > 1, _peak(model, cluster, engine, some), np.inf)


def with_fewest_micro_batches(table: LayoutTable) -> LayoutTable:
    """Rows that need fewer bytes in steps of the fewest microbatches that their schedule allows, with these
    microbatches."""
    least = np.where(table.runs("interleaved"), table.pipeline_parallel, 1)
    rows = np.flatnonzero(
        ((table.pipeline_parallel == 1) | table.runs("interleaved")) & (table.micro_batches > least)
    )
    some = table.take(rows)
    return replace(some, global_batch_size=some.micro_batch_size * some.data_parallel * least[rows])


def fastest_that_fit(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    plain: LayoutTable,
    kinds: Collection[Recompute],
    usual: bool = False,
) -> tuple[Ints, Prices]:
    """The fastest recomputation with which each row of `plain` fits, and the row that each result belongs to.

    Enumerated recomputation (all whole layers, core attention) is left out unless `usual`.
    """
    base, chosen = _fewest_layers(model, cluster, engine, plain, kinds, usual)
    prices = price(model, cluster, engine, chosen)
    first = first_of_each(base, prices.step_time_s)
    return base[first], prices.take(first)


def first_of_each(group: Ints, seconds: Floats) -> Ints:
    """The place of the fastest of each group."""
    fastest = np.lexsort((seconds, group))
    return fastest[np.flatnonzero(np.diff(group[fastest], prepend=-1))]


def with_recompute(
    table: LayoutTable, kind: Ints | int, modules: Ints | int, layers: Ints | None = None
) -> LayoutTable:
    """`table` with other recomputation: of all layers, or of the first `layers` of each stage."""
    kinds = np.broadcast_to(np.asarray(kind, dtype=np.int64), len(table))
    method = UNIFORM if layers is None else BLOCK
    return replace(
        table,
        recompute=kinds,
        recompute_modules=np.where(kinds == SELECTIVE, modules, 0),
        recompute_method=np.full(len(table), method),
        recompute_num_layers=np.ones(len(table), dtype=np.int64) if layers is None else layers,
    )


def with_each_recompute(
    model: ModelSpec,
    engine: Engine,
    plain: LayoutTable,
    kinds: Collection[Recompute],
    usual: bool = True,
) -> tuple[Ints, LayoutTable]:
    """Rows of `plain` with every set of modules in all layers, and with whole layers, and the row of `plain`
    that each belongs to.

    Args:
        usual: include the enumerated recomputation (whole layers, core attention).
    """
    sets = recompute_sets(model, engine, kinds)
    if not usual:
        sets = [(kind, modules) for kind, modules in sets if kind != FULL and modules != USUAL]
    base = np.tile(np.arange(len(plain)), len(sets))
    # Without a set, NumPy would take the numbers of none for floats.
    kind, modules = np.array(sets, dtype=np.int64).reshape(-1, 2).repeat(len(plain), axis=0).T
    able = ~(plain.runs(*SPLIT_BACKWARD)[base] & (kind == FULL))
    base, kind, modules = base[able], kind[able], modules[able]
    return base, with_recompute(plain.take(base), kind, modules)


def with_most_recompute(
    model: ModelSpec, engine: Engine, table: LayoutTable, kinds: Collection[Recompute]
) -> LayoutTable:
    """`table` with the recomputation of `kinds` that keeps the fewest bytes."""
    whole = ("full" in kinds) & ~table.runs(*SPLIT_BACKWARD)
    able = code_of("recompute_modules", engine.runs.modules_of(model.experts))
    return with_recompute(table, np.where(whole, FULL, SELECTIVE), MOST_MODULES & able)


def recompute_sets(model: ModelSpec, engine: Engine, kinds: Collection[Recompute]) -> list[tuple[int, int]]:
    """Sets of recomputation: whole layers, and every set of modules, as codes of the kind and of the
    modules."""
    able = code_of("recompute_modules", engine.runs.modules_of(model.experts))
    sets = [(FULL, 0)] * ("full" in kinds)
    return sets + [(SELECTIVE, some) for some in MODULE_SETS if "selective" in kinds and not some & ~able]


def _fewest_layers(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    plain: LayoutTable,
    kinds: Collection[Recompute],
    usual: bool,
) -> tuple[Ints, LayoutTable]:
    """The fewest layers that fit, for each row of `plain` and each set of modules, and the row that each
    number belongs to; for rows that offload activations, all layers too."""
    base, every_layer = with_each_recompute(model, engine, plain, kinds)
    kind, modules = every_layer.recompute, every_layer.recompute_modules
    held, most = _peak(model, cluster, engine, every_layer), every_layer.deepest.copy()
    some_layers = np.isin(kind, _kinds_of_some_layers(engine))
    near = some_layers & (held > cluster.memory_bytes) & (held <= NEAR * cluster.memory_bytes)
    rows = np.flatnonzero(near & (most > 1))
    if len(rows):
        held[rows] = _peak_of_all_but_one(
            model, cluster, engine, plain.take(base[rows]), kind[rows], modules[rows]
        )
        most[rows] -= 1
    fits = held <= cluster.memory_bytes
    base, kind, modules, most = (array[fits] for array in (base, kind, modules, most))
    held = held[fits]
    some_layers, table = some_layers[fits], plain.take(base)
    deepest = table.deepest

    def peak(rows: Ints, layers: Ints) -> Floats:
        return _peak(
            model, cluster, engine, with_recompute(table.take(rows), kind[rows], modules[rows], layers)
        )

    layers = most.copy()
    part = np.flatnonzero(some_layers)
    layers[part] = _fewest(
        lambda rows, layers: peak(part[rows], layers), most[part], held[part], cluster.memory_bytes
    )
    more = np.flatnonzero(table.offload_activations & (layers < most))
    base, kind, modules, deepest = (
        np.concatenate([array, array[more]]) for array in (base, kind, modules, deepest)
    )
    layers = np.concatenate([layers, most[more]])
    table = plain.take(base)
    every = layers == deepest
    new = usual | ~(every & ((kind == FULL) | (modules == USUAL)))
    # Whole layers that all recompute keep nothing to offload; without offload they are another row.
    new &= ~(every & (kind == FULL) & table.offload_activations)
    found = replace(
        with_recompute(table, kind, modules, layers),
        recompute_method=np.where(every, UNIFORM, BLOCK),
        recompute_num_layers=np.where(every, 1, layers),
    )
    return base[new], found.take(new)


def _fewest(peak: Callable[[Ints, Ints], Floats], deepest: Ints, held: Floats, limit: float) -> Ints:
    """The least number from 1 to `deepest` for each row with which its peak is within the limit.

    Args:
        peak: bytes of rows with given numbers, which fall as these grow.
        held: bytes with `deepest`, within the limit.
    """
    rows = np.flatnonzero(deepest > 1)
    high: Ints = deepest.copy()
    low = np.ones_like(deepest)
    above = np.full(len(deepest), np.inf)
    if len(rows):
        above[rows] = peak(rows, low[rows])
        high[rows] = np.where(above[rows] <= limit, 1, high[rows])
    below = held.copy()
    while len(rows := np.flatnonzero(high - low > 1)):
        # Bytes are a line, or the largest of a few: where it crosses the limit is almost always the answer,
        # and one layer less does not fit.
        lo, hi = low[rows], high[rows]
        share = (above[rows] - limit) / (above[rows] - below[rows])
        probe = np.clip(lo + np.ceil(share * (hi - lo)).astype(np.int64), lo + 1, hi - 1)
        less = np.flatnonzero(probe - 1 > lo)
        both = peak(np.concatenate([rows, rows[less]]), np.concatenate([probe, probe[less] - 1]))
        for some, layers, found in (
            (rows, probe, both[: len(rows)]),
            (rows[less], probe[less] - 1, both[len(rows) :]),
        ):
            fits = found <= limit
            lower = fits & (layers < high[some])
            higher = ~fits & (layers > low[some])
            high[some[lower]], below[some[lower]] = layers[lower], found[lower]
            low[some[higher]], above[some[higher]] = layers[higher], found[higher]
    return high


def _peak(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    return peak_memory(model, cluster, engine, table) if len(table) else np.zeros(0)


def recompute_kinds(pins: Pins, engine: Engine) -> tuple[Recompute, ...]:
    """The kinds of recomputation that may be solved: those that `engine` runs; empty where a pin decides."""
    names = ("recompute", "recompute_modules", "recompute_method", "recompute_num_layers")
    if any(name in pins and not isinstance(pins[name], Choice) for name in names):
        return ()
    choice = pins.get("recompute", Choice())
    assert isinstance(choice, Choice)
    return tuple(kind for kind in engine.runs.recompute if kind in choice)
