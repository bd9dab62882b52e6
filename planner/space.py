"""Every layout of a problem, and for each one that is illegal the rule that removes it.

The raw product of the degrees of freedom is an open grid: one axis a degree, arrays of length one on
all other axes. Rules are evaluated on it by broadcasting, so that only the layouts which survive are
ever written out as rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from costmodels.errors import InputError
from costmodels.hardware import Precision
from costmodels.layout import Recompute, even_split
from costmodels.model_spec import ModelSpec
from costmodels.table import RECOMPUTE_KINDS, Bools, Ints, LayoutTable
from planner.pins import ZERO_STAGES, Pins, PinValue, WherePossible
from planner.rules import RULES, Degrees, divisors

AXES = 6
"""Axes of the grid: mesh (tp, pp, dp), chunks, micro batch, sequence parallel, recompute, ZeRO."""


@dataclass(frozen=True)
class Batch:
    """The sequences of one optimizer step: exactly `size`, or at most `size`."""

    size: int
    maximum: bool = False

    def __str__(self) -> str:
        return f"{'max_' if self.maximum else ''}global_batch_size {self.size}"


@dataclass(frozen=True)
class Space:
    """The legal layouts and an account of the others."""

    table: LayoutTable
    considered: int
    """Layouts of the raw product."""
    illegal: dict[str, int]
    """Layouts by the first rule that they break; rules that none breaks are left out."""


def meshes(world_size: int, pins: Pins) -> list[tuple[int, int, int]]:
    """All (tp, pp, dp) whose product is the world size and that agree with the pins.

    Raises `InputError` when the pins leave none.
    """
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    pinned = {name: int(str(pins[name])) for name in names if name in pins}
    for name, value in pinned.items():
        if world_size % value:
            choices = ", ".join(map(str, divisors(world_size)))
            raise InputError(f"{name} {value} does not divide world size {world_size}; use {choices}")
    every = [
        (tp, pp, world_size // (tp * pp)) for tp in divisors(world_size) for pp in divisors(world_size // tp)
    ]
    wanted = tuple(pinned.get(name) for name in names)
    found = [mesh for mesh in every if all(w in (None, v) for w, v in zip(wanted, mesh, strict=True))]
    if not found:
        product = " x ".join(f"{name} {value}" for name, value in pinned.items())
        relation = "must equal" if len(pinned) == len(names) else "must divide"
        raise InputError(f"{product} is {math.prod(pinned.values())}; it {relation} world size {world_size}")
    return found


def micro_batch_sizes(batch: Batch) -> list[int]:
    """Powers of two and divisors up to the batch, ascending."""
    powers = [1 << exponent for exponent in range(batch.size.bit_length())]
    return sorted({*powers, *divisors(batch.size)})


def grid(model: ModelSpec, world_size: int, batch: Batch, pins: Pins) -> Degrees:
    """The raw product as an open grid with `AXES` axes."""
    mesh = np.asarray(meshes(world_size, pins), dtype=np.int64)
    tp, pp, dp = (_along(0, mesh[:, column]) for column in range(3))
    vpp = _along(1, _chunks(model, pins))
    mbs = _along(2, _chosen(pins, "micro_batch_size", micro_batch_sizes(batch)))
    sp = _grouped(pins, "sequence_parallel", tp, _along(3, (False, True))).astype(bool)
    kinds = _chosen(pins, "recompute", RECOMPUTE_KINDS)
    recompute = _along(4, [RECOMPUTE_KINDS.index(_kind(kind)) for kind in kinds])
    zero = _grouped(pins, "zero_stage", dp, _along(5, ZERO_STAGES))
    split = pins.get("layers_per_stage")
    one = _along(0, [1])
    entries, layers = pp * vpp, _along(0, [model.layers])
    if isinstance(split, tuple):
        entries, layers = _along(0, [len(split)]), _along(0, [sum(split)])
    return Degrees(
        tensor_parallel=tp,
        sequence_parallel=sp,
        pipeline_parallel=pp,
        virtual_pipeline_parallel=vpp,
        context_parallel=one,
        expert_parallel=one,
        expert_tensor_parallel=one,
        data_parallel=dp,
        zero_stage=zero,
        micro_batch_size=mbs,
        global_batch_size=_global_batch(batch, mbs * dp, pp, vpp),
        recompute=recompute,
        entries=entries,
        layers=layers,
    )


def build(model: ModelSpec, world_size: int, batch: Batch, precision: Precision, pins: Pins) -> Space:
    """All legal layouts of `model` on `world_size` devices, with the count of each rule.

    `considered == len(table) + sum(illegal.values())`. Raises `InputError` when the pinned degrees do
    not divide the world size.
    """
    degrees = grid(model, world_size, batch, pins)
    legal = np.ones(_shape(degrees), dtype=bool)
    illegal: dict[str, int] = {}
    remaining = considered = legal.size
    for rule in RULES:
        legal &= ~rule.broken(model, degrees)
        before, remaining = remaining, int(np.count_nonzero(legal))
        if before > remaining:
            illegal[rule.name] = before - remaining
    return Space(_rows(model, degrees, legal, precision, pins), considered, illegal)


def obstacle(model: ModelSpec, world_size: int, batch: Batch, pins: Pins) -> str:
    """Why no layout is legal: the rule that stops those which break fewest rules, with its numbers."""
    degrees = grid(model, world_size, batch, pins)
    shape = _shape(degrees)
    broken = [np.broadcast_to(rule.broken(model, degrees), shape) for rule in RULES]
    breaks = np.zeros(shape, dtype=np.int64)
    for mask in broken:
        breaks += mask
    nearest = breaks == breaks.min()
    counts = [int(np.count_nonzero(mask & nearest)) for mask in broken]
    first = counts.index(max(counts))
    where = np.unravel_index(int(np.argmax(broken[first] & nearest)), shape)
    layout = {
        field.name: np.asarray(np.broadcast_to(getattr(degrees, field.name), shape)[where])
        for field in fields(degrees)
    }
    return RULES[first].message(model, Degrees(**layout))


def _rows(model: ModelSpec, degrees: Degrees, legal: Bools, precision: Precision, pins: Pins) -> LayoutTable:
    where = np.nonzero(legal)

    def column(array: Ints | Bools) -> Ints:
        # An axis of length one holds the same value wherever the row lies on it.
        index = tuple(axis if size > 1 else 0 for axis, size in zip(where, array.shape, strict=True))
        values: Ints = np.broadcast_to(array[index], where[0].shape)
        return values

    pinned_split = pins.get("layers_per_stage")
    if isinstance(pinned_split, tuple):
        splits: tuple[tuple[int, ...], ...] = (pinned_split,)
        split = np.zeros(len(where[0]), dtype=np.int64)
    else:
        stages, split = np.unique(column(degrees.stages), return_inverse=True)
        splits = tuple(even_split(model.layers, int(count)) for count in stages)
    return LayoutTable(
        tensor_parallel=column(degrees.tensor_parallel),
        sequence_parallel=column(degrees.sequence_parallel).astype(bool),
        pipeline_parallel=column(degrees.pipeline_parallel),
        virtual_pipeline_parallel=column(degrees.virtual_pipeline_parallel),
        context_parallel=column(degrees.context_parallel),
        expert_parallel=column(degrees.expert_parallel),
        expert_tensor_parallel=column(degrees.expert_tensor_parallel),
        data_parallel=column(degrees.data_parallel),
        zero_stage=column(degrees.zero_stage),
        micro_batch_size=column(degrees.micro_batch_size),
        global_batch_size=column(degrees.global_batch_size),
        recompute=column(degrees.recompute),
        split=split,
        splits=splits,
        precision=precision,
    )


def _shape(degrees: Degrees) -> tuple[int, ...]:
    return np.broadcast_shapes(*(getattr(degrees, field.name).shape for field in fields(degrees)))


def _along(axis: int, values: Sequence[int] | Sequence[PinValue] | Ints) -> Ints:
    shape = [1] * AXES
    shape[axis] = len(values)
    return np.asarray(values, dtype=np.int64).reshape(shape)


def _chosen(pins: Pins, name: str, values: Sequence[PinValue]) -> Sequence[PinValue]:
    return (pins[name],) if name in pins else values


def _grouped(pins: Pins, name: str, size: Ints, values: Ints) -> Ints:
    """A degree that needs a group of `size` ranks; where only possible it follows the size's axis."""
    if name not in pins:
        return values
    pin = pins[name]
    if isinstance(pin, WherePossible):
        return np.where(size > 1, pin.value, 0)
    return _along(0, [pin])


def _kind(value: PinValue) -> Recompute:
    return next(kind for kind in RECOMPUTE_KINDS if kind == value)


def _chunks(model: ModelSpec, pins: Pins) -> Sequence[PinValue]:
    # Two pipeline ranks are the fewest that interleave.
    values = list(range(1, max(1, model.layers // 2) + 1))
    if pins.get("schedule") == "1f1b":
        values = [1]
    elif pins.get("schedule") == "interleaved":
        values = values[1:] or [2]
    return _chosen(pins, "virtual_pipeline_parallel", values)


def _global_batch(batch: Batch, unit: Ints, pp: Ints, vpp: Ints) -> Ints:
    """The batch of each layout: the given one, or the largest its schedule can run under the maximum.

    `unit` is micro_batch_size x data_parallel; the interleaved schedule needs multiples of pp of it.
    Where not even that many fit, the multiple of the smaller unit (or the maximum) shows what is missing.
    """
    if not batch.maximum:
        return np.full_like(unit, batch.size)
    whole = batch.size // unit * unit
    rounds = np.where(vpp > 1, unit * pp, unit)
    return np.where(rounds <= batch.size, batch.size // rounds * rounds, np.where(whole, whole, batch.size))
