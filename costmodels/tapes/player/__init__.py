"""Plays a training step of one rank over the tapes of its units: what it holds in memory at its peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from costmodels.memory.peak import dynamic_bytes, margin_bytes
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable
from costmodels.tapes.player.chain import Unit
from costmodels.tapes.player.heap import CATEGORIES, Moment
from costmodels.tapes.player.stage import Setting
from costmodels.tapes.player.step import Rank
from costmodels.tapes.store import default_version, has_tapes, tape_of
from costmodels.tapes.structure import LAYERS, Structure, structure_of, units_of_stage
from costmodels.tapes.structure import Unit as Kind

__all__ = [
    "CATEGORIES",
    "Moment",
    "missing",
    "plays",
    "rank_moments",
    "rank_peaks",
    "stage_memory",
    "units_of",
]


Structures = tuple[Structure, Structure | None]
"""The structure of a unit; of a layer that is computed again together with the one after it, also that
without recomputation."""


def structures_of_stage(model: ModelSpec, layout: Layout, stage: int, compiled: bool) -> list[Structures]:
    """The structures of the units of one stage, in the order of forward."""
    known: dict[tuple[Kind, bool], Structure] = {}

    def structure(unit: Kind, recomputes: bool) -> Structure:
        key = unit, recomputes
        if key not in known:
            known[key] = structure_of(model, layout, unit, compiled, recomputes)
        return known[key]

    found: list[Structures] = []
    number, count = 0, len(layout.layer_range(stage))
    is_block = layout.recompute_method == "block"
    together = 1 if layout.recompute == "none" or is_block else layout.recompute_num_layers
    again = layout.recompute_num_layers if is_block else count
    for unit in units_of_stage(model, layout, stage):
        plain = None
        recomputes = number < again
        if unit in LAYERS:
            number += 1
            if number % together and number < count:
                plain = structure(unit, False)
        found.append((structure(unit, recomputes), plain))
    return found


def missing(
    model: ModelSpec, layout: Layout, compiled: bool, version: str | None = None
) -> tuple[Structure, ...]:
    """The structures of a layout that have no tape."""
    version = version or default_version()
    every = {
        one
        for stage in range(len(layout.layers_per_stage))
        for both in set(structures_of_stage(model, layout, stage, compiled))
        for one in both
        if one is not None
    }
    splits = layout.schedule in SPLIT_BACKWARD
    return tuple(sorted(one for one in every if not _is_known(one, version, splits)))


def _is_known(structure: Structure, version: str, splits: bool) -> bool:
    """Whether a structure has a tape, and one with backward in two passes where these are needed."""
    if not splits or structure.unit == "embedding":
        return has_tapes([structure], version)
    tape = tape_of(structure, version)
    return tape is not None and tape.split is not None


def computes_layers_together(layout: Layout) -> bool:
    """Whether several layers are computed again at once."""
    is_uniform = layout.recompute == "full" and layout.recompute_method == "uniform"
    return is_uniform and layout.recompute_num_layers > 1


NEWEST = (2, 14)
"""The newest PyTorch whose FSDP2 and pipelines are played."""


def plays(model: ModelSpec, layout: Layout, compiled: bool, version: str | None = None) -> bool:
    """Whether the memory of a layout is known: there are tapes of all its units, and of their passes."""
    version = version or default_version()
    if tuple(map(int, version.split("."))) > NEWEST:
        return False
    if computes_layers_together(layout) and (compiled or layout.schedule in SPLIT_BACKWARD):
        return False
    return not missing(model, layout, compiled, version)


def rank_moments(
    model: ModelSpec, layout: Layout, rank: int, compiled: bool, version: str | None = None
) -> list[Moment]:
    """The highest moments of a step of one pipeline rank, one of each label.

    Raises:
        KeyError: a structure has no tape.
    """
    return _moments(model, layout, [rank], compiled, version)[0]


def rank_peaks(
    model: ModelSpec, layouts: Sequence[Layout], compiled: bool, version: str | None = None
) -> tuple[Floats, Floats]:
    """Allocated bytes of each pipeline rank at the peak of a step.

    Returns:
        Totals [n, k] and their compositions [categories, n, k] in the order of `CATEGORIES`, for k pipeline
        ranks; 0 for ranks that a layout does not have.

    Raises:
        KeyError: a structure has no tape.
    """
    ranks = max((layout.pipeline_parallel for layout in layouts), default=1)
    compositions = np.zeros((len(CATEGORIES), len(layouts), ranks))
    for row, layout in enumerate(layouts):
        every = _moments(model, layout, range(layout.pipeline_parallel), compiled, version)
        for rank, moments in enumerate(every):
            highest = max(moments, key=lambda moment: moment.total)
            compositions[:, row, rank] = highest.composition
    return compositions.sum(axis=0), compositions


def stage_memory(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, compiled: bool = False
) -> dict[str, Floats]:
    """Bytes on a device of each pipeline rank at the peak: the fields of `StageMemory`.

    Arrays of shape [n, k], or such that broadcast to it, for k pipeline ranks; 0 tensors for ranks that a row
    does not have.

    Args:
        table: rows that it `plays`.
    """
    layouts = [table.layout(row) for row in range(len(table))]
    _, compositions = rank_peaks(model, layouts, compiled)
    parts = dict(zip(CATEGORIES, compositions, strict=True))
    lost = engine.allocator.fragmentation * dynamic_bytes(parts)
    return parts | margin_bytes(cluster, engine, table, lost, model.experts > 0)


def _moments(
    model: ModelSpec, layout: Layout, ranks: Iterable[int], compiled: bool, version: str | None
) -> list[list[Moment]]:
    version = version or default_version()
    setting, found = Setting(model, layout), []
    for rank in ranks:
        units = [units_of(model, layout, stage, compiled, version) for stage in layout.stages_of(rank)]
        played = Rank(setting, units, rank)
        played.run()
        played.update()
        found.append([moment for moment in played.heap.moments() if moment.label != "build"])
    return found


def units_of(model: ModelSpec, layout: Layout, stage: int, compiled: bool, version: str) -> list[Unit]:
    """The units of one stage with their tapes, in the order of forward.

    Raises:
        KeyError: one has no tape.
    """
    found: list[Unit] = []
    for structure, plain in structures_of_stage(model, layout, stage, compiled):
        tapes = [tape_of(one, version) for one in (structure, plain) if one is not None]
        if tapes[0] is None or tapes[-1] is None:
            raise KeyError(structure.name if tapes[0] is None or plain is None else plain.name)
        found.append(Unit(structure.unit, tapes[0], None if plain is None else tapes[1]))
    return found
