"""Plays a training step of one rank over the tapes of its units: what it holds in memory at its peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from costmodels.layers.shapes import distinct_shapes
from costmodels.memory.peak import dynamic_bytes, gathering_reserve_bytes, margin_bytes
from costmodels.memory.unit_sizes import rank_parameters, row_unit_sizes
from costmodels.pytorch import parsed_version
from costmodels.ranks.rank_layers import ranks_of_table
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable
from costmodels.spec.untrained import untrained_parts
from costmodels.tapes.player.heap import CATEGORIES, Moment
from costmodels.tapes.player.setting import KnownSizes, Setting
from costmodels.tapes.player.split_layers import UnalignedError
from costmodels.tapes.player.stage import Stages
from costmodels.tapes.player.stage_units import (
    Known,
    computes_layers_together,
    structures_of_stage,
    units_of,
)
from costmodels.tapes.player.step import Rank
from costmodels.tapes.player.ways import NEWEST, ways_of
from costmodels.tapes.store import default_version, has_tapes, tape_of
from costmodels.tapes.structure import Structure

__all__ = [
    "CATEGORIES",
    "Moment",
    "is_playable",
    "missing",
    "plays",
    "rank_moments",
    "rank_peaks",
    "stage_memory",
    "structures_of_stage",
    "units_of",
]


def missing(
    model: ModelSpec, layout: Layout, compiled: bool, version: str | None = None
) -> tuple[Structure, ...]:
    """The structures of a layout that have no tape."""
    version, known = version or default_version(), Known()
    every = {
        one
        for stage in range(len(layout.layers_per_stage))
        for wanted in structures_of_stage(model, layout, stage, compiled, known)
        for one in (wanted.structure, wanted.plain)
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


def plays(model: ModelSpec, layout: Layout, compiled: bool, version: str | None = None) -> bool:
    """Whether the memory of a layout is known: there are tapes of all its units, and of their passes."""
    if not is_playable(model, layout, compiled, version) or missing(model, layout, compiled, version):
        return False
    if layout.schedule in SPLIT_BACKWARD and computes_layers_together(layout):
        version, known = version or default_version(), Known()
        try:
            for stage in range(len(layout.layers_per_stage)):
                units_of(model, layout, stage, compiled, version, known)
        except UnalignedError:
            return False
    return True


def is_playable(model: ModelSpec, layout: Layout, compiled: bool, version: str | None = None) -> bool:
    """Whether the memory of a layout would be known with tapes of all its units."""
    if parsed_version(version or default_version()) > NEWEST:
        return False
    if untrained_parts(model) or model.lora is not None:
        return False
    if layout.gathers_fp8 or layout.precision == "mxfp8" or layout.expert_halves or layout.cuda_graphs:
        # Units are recorded with weights in the format that computes, and with tokens that travel at once.
        # What graphs keep is not played, and no sizes tell how factors of 32 elements fill their tiles.
        return False
    return layout.schedule not in SPLIT_BACKWARD or not compiled


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
    sizes: KnownSizes = {}
    for row, layout in enumerate(layouts):
        every = _moments(model, layout, range(layout.pipeline_parallel), compiled, version, sizes)
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
    if engine.allocator.gathering_reserve:
        sizes = row_unit_sizes(model, engine, *distinct_shapes(table))
        held = rank_parameters(sizes, ranks_of_table(model, table))
        lost = lost + gathering_reserve_bytes(engine, table, *held)
    ranks = np.arange(compositions.shape[-1]) < table.pipeline_parallel[:, None]
    parts["temporaries"] = parts["temporaries"] + engine.allocator.workspace_bytes * ranks
    return parts | margin_bytes(cluster, engine, table, lost, model.experts > 0)


def _moments(
    model: ModelSpec,
    layout: Layout,
    ranks: Iterable[int],
    compiled: bool,
    version: str | None,
    sizes: KnownSizes | None = None,
) -> list[list[Moment]]:
    version, known = version or default_version(), Known()
    every, found = Stages(Setting(model, layout, ways_of(version), sizes)), []
    for rank in ranks:
        stages = layout.stages_of(rank)
        units = [units_of(model, layout, stage, compiled, version, known) for stage in stages]
        played = Rank(every, units, rank)
        played.run()
        played.update()
        found.append([moment for moment in played.heap.moments() if moment.label != "build"])
    return found
