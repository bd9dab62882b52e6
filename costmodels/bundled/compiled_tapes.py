"""Tapes of compiled layers."""

from __future__ import annotations

from functools import lru_cache

from costmodels.bundled.compiled_segments import (
    Segment,
    compiled_around_ring,
    compiled_mixture,
    run_segment,
    segment,
)
from costmodels.bundled.replay import Leaf, Tensor
from costmodels.bundled.structure import RESIDUAL, WEIGHTS, Structure
from costmodels.bundled.tapes import ENDS, VECTORS, UnitTape, replayed_unit
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, LayoutTable


def compiled_covers(model: ModelSpec, table: LayoutTable) -> Bools:
    """Rows, of those whose eager layers are known, whose compiled layers are known too.

    Not known: sequences shared by ranks with latent attention. Schedules that split backward never compile.
    """
    latent = model.latent_attention is not None
    result: Bools = ~table.runs(*SPLIT_BACKWARD) & ~(latent & (table.context_parallel > 1))
    return result


@lru_cache(maxsize=1024)
def compiled_layer_tape(structure: Structure) -> UnitTape:
    """One layer."""
    names = (*(name for name in WEIGHTS if name not in ENDS), *VECTORS)

    def layer(leaves: dict[str, Leaf], x: Tensor) -> Tensor:
        if structure.experts:
            return compiled_mixture(structure, leaves, x)
        if structure.context_form == "ring":
            return compiled_around_ring(structure, leaves, x)
        return run_segment(_layer(structure), leaves, [x])[0]

    return replayed_unit(structure, names, layer, compiled=True)


@lru_cache(maxsize=1024)
def _layer(structure: Structure) -> Segment:
    return segment(structure, [RESIDUAL], lambda layer, inputs: [layer.forward(*inputs)])
