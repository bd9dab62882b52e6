"""Which tapes the units of a stage play, from its layout."""

from typing import NamedTuple

from costmodels.spec.hardware import NARROW
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.player.bundle import wraps_parameters
from costmodels.tapes.player.chain import Unit
from costmodels.tapes.player.plain_parameters import with_plain_parameters
from costmodels.tapes.player.repeated_layers import holding_input, repeated
from costmodels.tapes.player.split_layers import split_together, with_brief_input
from costmodels.tapes.store import tape_of, tape_of_steps
from costmodels.tapes.structure import LAYERS, Structure, UnitKind, structure_of, units_of_stage
from costmodels.tapes.tape import Tape


class Wanted(NamedTuple):
    """The structures of a unit."""

    structure: Structure
    plain: Structure | None = None
    """Without recomputation, of a layer that is computed again together with the one after it."""
    repeats: bool = False
    """A compiler does not know of its recomputation; `structure` is one without."""
    is_first: bool = False
    """It is the first of the layers that are computed again together."""


class Known:
    """What stages of one layout have been found to have, compiled or not: most have the same units."""

    def __init__(self) -> None:
        self.structures: dict[tuple[UnitKind, bool, bool], Structure] = {}
        """By unit and attention, whether it recomputes, and whether it is the last layer of its stage."""
        self.stages: dict[tuple[UnitKind, ...], list[Wanted]] = {}
        """By their units."""
        self.units: dict[tuple[UnitKind, ...], list[Unit]] = {}


def structures_of_stage(
    model: ModelSpec, layout: Layout, stage: int, compiled: bool, known: Known | None = None
) -> list[Wanted]:
    """The structures of the units of one stage, in the order of forward.

    Args:
        known: those that other stages of the layout have; more are added.
    """
    known = known or Known()
    kinds = tuple(units_of_stage(model, layout, stage))
    if kinds not in known.stages:
        known.stages[kinds] = _structures(model, layout, kinds, compiled, known.structures)
    return known.stages[kinds]


def _structures(
    model: ModelSpec,
    layout: Layout,
    kinds: tuple[UnitKind, ...],
    compiled: bool,
    known: dict[tuple[UnitKind, bool, bool], Structure],
) -> list[Wanted]:
    def structure(kind: UnitKind, recomputes: bool, is_last: bool) -> Structure:
        key = kind, recomputes, is_last
        if key not in known:
            known[key] = structure_of(model, layout, kind[0], compiled, recomputes, is_last, kind[1])
        return known[key]

    found: list[Wanted] = []
    number, count = 0, sum(kind.unit in LAYERS for kind in kinds)
    is_block = layout.recompute_method == "block"
    together = 1 if layout.recompute == "none" or is_block else layout.recompute_num_layers
    again = layout.recompute_num_layers if is_block else count
    repeats = compiled and computes_layers_together(layout)
    for kind in kinds:
        if kind.unit not in LAYERS:
            found.append(Wanted(structure(kind, False, kind.unit == "head")))
            continue
        is_first, recomputes = number % together == 0, number < again
        number += 1
        is_last = number % together == 0 or number == count
        plain = None if is_last else structure(kind, False, False)
        whole = repeats and _is_one_graph(kind, model, layout)
        own = structure(kind, recomputes and not whole, number == count)
        found.append(Wanted(own, plain, whole, is_first))
    return found


def computes_layers_together(layout: Layout) -> bool:
    """Whether several layers are computed again at once."""
    is_uniform = layout.recompute == "full" and layout.recompute_method == "uniform"
    return is_uniform and layout.recompute_num_layers > 1


def _is_one_graph(kind: UnitKind, model: ModelSpec, layout: Layout) -> bool:
    """Whether a compiled layer is one graph (`runtime.train.stages.build_stage`)."""
    in_ring = layout.context_parallel > 1 and layout.context_parallel_form == "ring"
    steps = kind.attention == "linear" or model.attention_softcap > 0
    return kind.unit != "experts" and not in_ring and not steps


def units_of(
    model: ModelSpec, layout: Layout, stage: int, compiled: bool, version: str, known: Known | None = None
) -> list[Unit]:
    """The units of one stage with their tapes, in the order of forward.

    Raises:
        KeyError: one has no tape.
    """
    known = known or Known()
    kinds = tuple(units_of_stage(model, layout, stage))
    if kinds in known.units:
        return known.units[kinds]
    splits = layout.schedule in SPLIT_BACKWARD and computes_layers_together(layout)
    found: list[Unit] = []
    for wanted in structures_of_stage(model, layout, stage, compiled, known):
        tape = _known_tape(wanted.structure, model, layout, version)
        plain = None if wanted.plain is None else _known_tape(wanted.plain, model, layout, version)
        if wanted.repeats and plain is not None and wanted.is_first:
            plain = holding_input(plain)
        if splits and wanted.structure.unit in LAYERS:
            if plain is not None:
                plain = split_together(tape, plain, wanted.is_first)
            elif not wanted.is_first:
                tape = with_brief_input(tape)
        found.append(Unit(wanted.structure.unit, repeated(tape) if wanted.repeats else tape, plain))
    known.units[kinds] = found
    return found


def _known_tape(structure: Structure, model: ModelSpec, layout: Layout, version: str) -> Tape:
    tape = tape_of(structure, version)
    if tape is None:
        raise KeyError(structure.name)
    if tape.repeats is not None:
        tape = tape_of_steps(structure, version, dimensions(model, layout)[tape.repeats.dimension])
    if wraps_parameters(layout):
        return tape
    in_operations = not structure.compiled or structure.offloads_activations in ("sent", "kept")
    return with_plain_parameters(tape, in_operations and layout.precision not in NARROW)
