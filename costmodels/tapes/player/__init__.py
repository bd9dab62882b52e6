"""Plays a training step of one rank over the tapes of its units: what it holds in memory at its peaks."""

from __future__ import annotations

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.player.heap import CATEGORIES, Moment
from costmodels.tapes.player.stage import Unit
from costmodels.tapes.player.step import Rank
from costmodels.tapes.store import default_version, has_tapes, tape_of
from costmodels.tapes.structure import LAYERS, Structure, structure_of, units_of_stage

__all__ = ["CATEGORIES", "Moment", "missing", "rank_moments"]


def structures_of_stage(model: ModelSpec, layout: Layout, stage: int, compiled: bool) -> list[Structure]:
    """The structures of the units of one stage, in the order of forward."""
    found, layers = [], 0
    again = (
        layout.recompute_num_layers if layout.recompute_method == "block" else len(layout.layer_range(stage))
    )
    for unit in units_of_stage(model, layout, stage):
        found.append(structure_of(model, layout, unit, compiled, recomputes=layers < again))
        layers += unit in LAYERS
    return found


def missing(
    model: ModelSpec, layout: Layout, compiled: bool, version: str | None = None
) -> tuple[Structure, ...]:
    """The structures of a layout that have no tape."""
    version = version or default_version()
    stages = range(len(layout.layers_per_stage))
    every = {one for stage in stages for one in structures_of_stage(model, layout, stage, compiled)}
    return tuple(sorted(one for one in every if not has_tapes([one], version)))


def rank_moments(
    model: ModelSpec, layout: Layout, rank: int, compiled: bool, version: str | None = None
) -> list[Moment]:
    """The highest moments of a step of one pipeline rank, one of each label."""
    version = version or default_version()
    played = Rank(
        model,
        layout,
        [_units(model, layout, stage, compiled, version) for stage in layout.stages_of(rank)],
        rank,
    )
    played.run()
    played.update()
    return [moment for moment in played.heap.moments() if moment.label != "build"]


def _units(model: ModelSpec, layout: Layout, stage: int, compiled: bool, version: str) -> list[Unit]:
    found: list[Unit] = []
    for structure in structures_of_stage(model, layout, stage, compiled):
        tape = tape_of(structure, version)
        if tape is None:
            raise KeyError(structure.name)
        found.append((structure, tape))
    return found
