"""Every layout of a problem, and the rule that removes each illegal one.

The raw product of the degrees of freedom is an open grid: one axis a degree, arrays of length one on all
other axes. Rules are evaluated on it by broadcasting, so only legal layouts are written out as rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import (
    CHUNKS_OF_SCHEDULES,
    SHORT_NAMES,
    Layout,
    even_split,
    schedule_takes,
)
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import (
    ARRAY_FIELDS,
    BOOLEANS,
    FORMATS,
    RECOMPUTE_KINDS,
    SCHEDULES,
    SELECTIVE,
    Bools,
    Ints,
    LayoutTable,
    code_of,
    distinct_numbers,
    numbered_splits,
)
from planner.inputs.batch import Batch
from planner.inputs.choice import Choice, allowed_values
from planner.inputs.pins import ZERO_STAGES, Pins, PinValue, WherePossible
from planner.space.grid_table import GridTable, Places, flat_places, places_of
from planner.space.meshes import meshes_with_forms, with_experts
from planner.space.open_grid import OpenGrid
from planner.space.rule import Rule, divisors
from planner.space.rules import RULES
from planner.space.shared_stages import shared_splits

AXES = 6
"""Axes of the grid: mesh (tp, pp, cp and its form, dp, ep, etp), chunks and schedule, microbatch, sequence
parallel, recompute, ZeRO."""

SINGLE_VALUES = {
    "zero_replicas": 1,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "offload_activations": False,
    "offload_optimizer": False,
    "optimizer": "adam",
    "expert_halves": False,
    "cuda_graphs": False,
}
"""Fields with one value in a search: the value here, or the pinned one."""

PLAIN_SCHEDULES = ("1f1b", "interleaved")

CHUNKS = ("virtual_pipeline_parallel", "schedule")
"""Degrees that share one axis."""


@dataclass(frozen=True)
class Space:
    """The legal layouts and an account of the others."""

    table: LayoutTable
    states: Places
    """Number of the group of each row with equal parameters, gradients and optimizer states. Rows of a group
    differ only in sequences, sequence parallelism and recomputation, and either all or none have several
    microbatches."""
    work: Places
    """Number of the group of each row with equal work; rows of a group differ only in ZeRO and
    recomputation."""
    considered: int
    """Number of layouts of the raw product."""
    illegal: dict[str, int]
    """Numbers of layouts by the first rule that they break; rules that no layout breaks are left out."""
    has_reserve: bool = False
    """True if layouts in reserve are among the legal ones, because no other is legal."""

    def take(self, rows: Ints) -> Space:
        """The space with some of its layouts; `considered` and `illegal` stay those of all."""
        return replace(self, table=self.table.take(rows), states=self.states[rows], work=self.work[rows])


@dataclass(frozen=True)
class MicroBatches:
    """Values along the axis of the microbatch; arrays of [n]."""

    size: Ints
    """Sequences of a microbatch."""
    fewest: Bools
    """True where a step has only the microbatches that its schedule needs; otherwise it has as many as the
    batch holds."""


Admit = Callable[[OpenGrid], tuple[OpenGrid, Bools]]
"""A function that admits layouts of a grid.

It returns a part of the grid and a mask of its admitted layouts. Pairs of mesh and chunks are along the first
axis.
"""


def micro_batch_sizes(batch: Batch, pins: Pins | None = None) -> Sequence[int]:
    """Powers of two and divisors up to the batch, ascending, that the pins allow.

    Under a maximum, pins may exclude all of these and allow others; then the ends of the allowed range
    represent them.
    """
    powers = [1 << exponent for exponent in range(batch.size.bit_length())]
    usual = sorted({*powers, *divisors(batch.size)})
    pin = None if pins is None else pins.get("micro_batch_size")
    if batch.maximum and isinstance(pin, Choice) and not any(size in pin for size in usual):
        every = [size for size in range(1, batch.size + 1) if size in pin]
        usual = sorted({*every[:1], *every[-1:]}) or usual
    return usual if pins is None else allowed_values(pins, "micro_batch_size", usual)


def grid(
    model: ModelSpec,
    world_size: int,
    batch: Batch,
    pins: Pins,
    schedules: Sequence[str] = SCHEDULES,
    micro_batches: MicroBatches | None = None,
) -> OpenGrid:
    """The raw product as an open grid with `AXES` axes.

    Args:
        schedules: schedules that pins allow.
        micro_batches: sizes to use instead of the usual ones.
    """
    mesh = with_experts(model, meshes_with_forms(world_size, pins), pins)
    tp, pp, cp, dp, form, ep, etp = (_along(0, column) for column in mesh.T)
    vpp, schedule = (_along(1, column) for column in _chunks(model, pins, schedules))
    if micro_batches is None:
        sizes = np.array(micro_batch_sizes(batch, pins), dtype=np.int64)
        micro_batches = MicroBatches(sizes, np.zeros(len(sizes), dtype=np.bool_))
    mbs, fewest = _along(2, micro_batches.size), _along(2, micro_batches.fewest.astype(np.int64)).astype(bool)
    sp = _grouped(pins, "sequence_parallel", tp, 3, (False, True)).astype(bool)
    kinds = allowed_values(pins, "recompute", RECOMPUTE_KINDS)
    recompute = _along(4, [code_of("recompute", kind) for kind in kinds])
    modules = code_of("recompute_modules", pins.get("recompute_modules", ("core_attention",)))
    zero = _grouped(pins, "zero_stage", dp * cp, 5, ZERO_STAGES)
    fixed: dict[str, Any] = {
        name: _along(0, [code_of(name, pins.get(name, usual))]) for name, usual in SINGLE_VALUES.items()
    }
    fixed |= {name: fixed[name].astype(bool) for name in BOOLEANS if name in fixed}
    split = pins.get("layers_per_stage")
    entries, layers = pp * vpp, _along(0, [model.layers])
    deepest = -(-model.layers // entries)
    if isinstance(split, tuple):
        counts = [int(count) for count in split]
        entries, layers, deepest = (_along(0, [n]) for n in (len(counts), sum(counts), max(counts)))
    columns: dict[str, Any] = dict(
        tensor_parallel=tp,
        sequence_parallel=sp,
        pipeline_parallel=pp,
        virtual_pipeline_parallel=vpp,
        context_parallel=cp,
        context_parallel_form=form,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        data_parallel=dp,
        zero_stage=zero,
        schedule=schedule,
        micro_batch_size=mbs,
        batch=_along(0, [batch.size]),
        batch_is_maximum=_along(0, [batch.maximum]).astype(bool),
        fewest=fewest,
        recompute=recompute,
        recompute_modules=np.where(recompute == SELECTIVE, modules, 0),
        entries=entries,
        layers=layers,
        deepest=deepest,
        **fixed,
    )
    return OpenGrid.on(columns)


def build(
    model: ModelSpec,
    world_size: int,
    batch: Batch,
    precision: Precision,
    pins: Pins,
    further: Sequence[Rule] = (),
    micro_batches: MicroBatches | None = None,
    admit: Admit | None = None,
    reserve: bool = False,
    stages_alike: bool = False,
) -> Space:
    """All legal layouts of `model` on `world_size` devices, with the count of each rule.

    `considered == len(table) + sum(illegal.values())` without `admit`. Raises `InputError` when the pinned
    degrees do not divide the world size.

    Args:
        further: the rules of an engine or a job, besides those of all layouts.
        micro_batches: sizes to use instead of the usual ones.
        admit: selects layouts, also among those in reserve; if None, all but those in reserve.
        reserve: include layouts in reserve, as if no other layout were legal.
        stages_alike: the engine itself divides the layers into stages (`planner.space.shared_stages`).
    """
    degrees = grid(model, world_size, batch, pins, micro_batches=micro_batches)
    legal = np.ones((1,) * AXES, dtype=bool)
    illegal: dict[str, int] = {}
    remaining = considered = math.prod(degrees.shape)
    every, asked = _rules(pins, further), admit is not None
    for rule in every:
        if rule.reserve and (asked or reserve):
            continue
        broken = rule.broken(model, degrees)
        if max(broken.shape[2:], default=1) > 1 and (admit is not None or degrees.shape[1] > 1):
            # The first rule that looks past mesh and chunks is asked about those that are left.
            degrees, legal = _admitted(*_flattened(degrees, legal), admit)
            admit, remaining = None, _count(legal, degrees.shape) if asked else remaining
            broken = rule.broken(model, degrees)
        if not broken.any():
            continue
        legal = legal & ~broken
        before, remaining = remaining, _count(legal, degrees.shape)
        if before > remaining:
            illegal[rule.name] = before - remaining
    if admit is not None:
        degrees, legal = _admitted(*_flattened(degrees, legal), admit)
    legal = np.broadcast_to(legal, degrees.shape)
    where, shape = places_of(legal), legal.shape
    if not len(where[0]) and not asked and not reserve:
        every_layout = build(
            *(model, world_size, batch, precision, pins, further, micro_batches),
            reserve=True,
            stages_alike=stages_alike,
        )
        if len(every_layout.table):
            return every_layout
    table = _table(model, degrees, legal, where, precision, pins, stages_alike)
    states = flat_places((*shape[:2], 1, 1, 1, shape[5]), where)
    work = flat_places((*shape[:4], 1, 1), where)
    alone = degrees.micro_batches == 1
    if alone.any():
        # With one microbatch gradients may be reduced before they are whole.
        states = 2 * states
        states += alone.ravel().take(flat_places(alone.shape, where))
    return Space(table, states, work, considered, illegal, reserve)


def _rules(pins: Pins, further: Sequence[Rule]) -> list[Rule]:
    """The rules of a search; a rule against redundant layouts is lifted by pins that ask for these
    layouts."""
    fixed = {name for name, value in pins.items() if not isinstance(value, Choice)}
    usual = [rule for rule in RULES if not rule.is_lifted(fixed)]
    early = [rule for rule in further if rule.of_mesh]
    return [*early, *usual, *(rule for rule in further if not rule.of_mesh)]


def _count(legal: Bools, shape: tuple[int, ...]) -> int:
    """The number of layouts of a grid of `shape` that a mask selects; the mask's axes of length one are
    broadcast."""
    return int(np.count_nonzero(legal)) * (math.prod(shape) // legal.size if legal.size else 0)


def _flattened(degrees: OpenGrid, legal: Bools) -> tuple[OpenGrid, Bools]:
    """The grid of the pairs of mesh and chunks that `legal` allows; the pairs are along the first axis."""
    shape = degrees.shape
    rows, columns = np.nonzero(np.broadcast_to(legal, (*shape[:2], 1, 1, 1, 1))[:, :, 0, 0, 0, 0])

    def taken(array: Ints | Bools) -> Any:
        if array.shape[:2] == (1, 1):
            return array
        picked = array[rows if array.shape[0] > 1 else 0, columns if array.shape[1] > 1 else 0]
        return picked[:, None]

    return degrees.map(taken), np.ones((len(rows), *(1,) * (AXES - 1)), dtype=bool)


def _admitted(degrees: OpenGrid, legal: Bools, admit: Admit | None) -> tuple[OpenGrid, Bools]:
    """The grid without those pairs of mesh and chunks, and those microbatches, that have no admitted
    layout."""
    if admit is None:
        return degrees, legal
    before = degrees
    degrees, admitted = admit(degrees)
    some: Any = admitted.any(axis=(1, 3, 4, 5))
    pairs, sizes = np.flatnonzero(some.any(axis=1)), np.flatnonzero(some.any(axis=0))

    if not len(pairs):
        # One that is not admitted stands for all, so that no axis is empty.
        degrees, admitted = before, np.zeros((1,) * AXES, dtype=np.bool_)
        pairs = sizes = np.zeros(1, dtype=np.int64)

    def taken(array: Ints | Bools) -> Any:
        for axis, places in ((0, pairs), (2, sizes)):
            array = array.take(places, axis=axis) if array.shape[axis] > 1 else array
        return array

    return degrees.map(taken), taken(admitted)


def obstacle(
    model: ModelSpec, world_size: int, batch: Batch, pins: Pins, further: Sequence[Rule] = ()
) -> str:
    """The reason why no layout is legal: the rule, with its numbers, that layouts with the fewest broken
    rules break.

    Only plain layouts are examined if pins allow them, as the reasons of others are seldom simpler.
    """
    plain: Pins = {"expert_parallel": 1, "expert_tensor_parallel": 1}
    if "context_parallel_form" not in pins:
        plain["context_parallel"] = 1
    degrees = grid(
        model, world_size, batch, plain | pins, SCHEDULES if "schedule" in pins else PLAIN_SCHEDULES
    )
    shape = degrees.shape
    rules = _rules(pins, further)
    broken = [np.broadcast_to(rule.broken(model, degrees), shape) for rule in rules]
    too_few = _too_few_sequences(world_size, batch, degrees, rules, broken)
    if too_few is not None:
        return too_few
    breaks = np.zeros(shape, dtype=np.int64)
    for mask in broken:
        breaks += mask
    nearest = breaks == breaks.min()
    counts = [int(np.count_nonzero(mask & nearest)) for mask in broken]
    first = counts.index(max(counts))
    where = np.unravel_index(int(np.argmax(broken[first] & nearest)), shape)
    one = degrees.map(lambda array: np.asarray(np.broadcast_to(array, shape)[where]))
    return rules[first].message(model, one)


BATCH_RULES = (
    *("batch_too_small", "batch_divisibility", "pipeline_micro_batches"),
    *("interleaved_micro_batches", "v_micro_batches"),
)
"""Rules that another batch would satisfy."""


def _too_few_sequences(
    world_size: int, batch: Batch, degrees: OpenGrid, rules: Sequence[Rule], broken: Sequence[Bools]
) -> str | None:
    """The error where layouts break only rules about the batch, and all of them need a larger batch.

    Args:
        broken: masks of the layouts that break each of `rules`, on the whole grid.
    """
    legal = np.ones(degrees.shape, dtype=bool)
    for rule, mask in zip(rules, broken, strict=True):
        if rule.name not in BATCH_RULES:
            legal &= ~mask
    # A pipeline is full with as many microbatches as ranks.
    needed = degrees.micro_batch_size * degrees.data_parallel * degrees.pipeline_parallel
    every = np.where(legal, np.broadcast_to(needed, legal.shape), np.iinfo(np.int64).max)
    least = int(every.min())
    if not legal.any() or least <= batch.size:
        return None
    where = np.unravel_index(int(every.argmin()), every.shape)
    shown = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    sizes = {name: int(np.broadcast_to(getattr(degrees, name), every.shape)[where]) for name in shown}
    layout = " ".join(
        f"{short}={sizes[name]}" for short, name in SHORT_NAMES.items() if sizes.get(name, 1) > 1
    )
    return (
        f"a batch of {batch.size} is too small for {world_size} devices; use fewer of them, or a batch of "
        f"{least} or more, as {layout} needs"
    )


def _table(
    model: ModelSpec,
    degrees: OpenGrid,
    legal: Bools,
    where: tuple[Places, ...],
    precision: Precision,
    pins: Pins,
    stages_alike: bool,
) -> GridTable:
    pinned_split = pins.get("layers_per_stage")
    if isinstance(pinned_split, tuple):
        splits: tuple[tuple[int, ...], ...] = (tuple(int(count) for count in pinned_split),)
        split = np.zeros((1,) * AXES, dtype=np.int64)
    else:
        stages = degrees.stages
        if stages_alike:
            # One number for stages and chunks.
            stages = stages * (model.layers + 1) + degrees.virtual_pipeline_parallel
        some = legal.any(axis=tuple(range(2, AXES)), keepdims=True)
        counts = distinct_numbers(np.broadcast_to(stages, some.shape)[some])
        split = np.searchsorted(counts, stages) if counts else np.zeros_like(stages)
        if stages_alike:
            shares = (divmod(count, model.layers + 1) for count in counts)
            splits, places = numbered_splits(shared_splits(model.layers, *share)[0] for share in shares)
            split = places[np.minimum(split, len(counts) - 1)] if counts else split
        else:
            splits = tuple(even_split(model.layers, count) for count in counts)
    columns = {name: getattr(degrees, name) for name in ARRAY_FIELDS if name != "split"}
    return GridTable.on(columns | {"split": split}, where, splits, _formats(precision, pins))


def table_at(degrees: OpenGrid, where: tuple[Places, ...], precision: Precision, pins: Pins) -> LayoutTable:
    """The layouts at given places of a grid, without batch and layers of stages."""
    named = {name: degrees.columns[name] for name in ARRAY_FIELDS if name in degrees.columns}
    none = np.zeros((1,) * AXES, dtype=np.int64)
    table = GridTable.on(
        {**named, "split": none, "global_batch_size": none}, where, ((),), _formats(precision, pins)
    )
    return table.take(slice(None))


def _formats(precision: Precision, pins: Pins) -> dict[str, Any]:
    """The number formats of the layouts: the given precision, and the pinned values of the others."""
    others = {name: pins.get(name, Layout.model_fields[name].default) for name in FORMATS[1:]}
    return {"precision": precision, **others}


def _along(axis: int, values: Sequence[int] | Sequence[PinValue] | Ints) -> Ints:
    shape = [1] * AXES
    shape[axis] = len(values)
    return np.asarray(values, dtype=np.int64).reshape(shape)


def _grouped(pins: Pins, name: str, size: Ints, axis: int, values: Sequence[int]) -> Ints:
    """Values of a degree that needs a group of `size` ranks; a pin "where possible" follows the axis of the
    size."""
    pin = pins.get(name)
    if isinstance(pin, WherePossible):
        return np.where(size > 1, pin.value, 0)
    return _along(axis, allowed_values(pins, name, values))


def _chunks(model: ModelSpec, pins: Pins, schedules: Sequence[str]) -> tuple[list[int], list[int]]:
    """Numbers of chunks that pins allow, and the code of the schedule of each.

    If a pinned schedule allows no number of chunks that the layers allow, two chunks stay, so that the rules
    report it.
    """
    # Two pipeline ranks are the fewest that interleave.
    counts = allowed_values(pins, "virtual_pipeline_parallel", range(1, max(1, model.layers // 2) + 1))
    wanted = allowed_values(pins, "schedule", schedules)
    kinds = [schedule for schedule in SCHEDULES if schedule in wanted]
    pairs = [(count, kind) for count in counts for kind in kinds if schedule_takes(kind, count)]
    if not pairs and any(isinstance(pins.get(name), Choice) for name in CHUNKS):
        said = " and ".join(f"{name}={pins[name]}" for name in CHUNKS if name in pins)
        raise InputError(f"pin {said} leaves no schedule: {CHUNKS_OF_SCHEDULES}")
    pairs = pairs or [(2, kind) for kind in kinds]
    return [count for count, _ in pairs], [code_of("schedule", kind) for _, kind in pairs]
