"""Tapes of compiled layers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from costmodels.bundled.compiled_segments import CompiledMixtureLayer, Segment, run_segment, segment
from costmodels.bundled.structure import RESIDUAL, WEIGHTS, Structure
from costmodels.bundled.tapes import ENDS, VECTORS, UnitTape, replayed_unit
from costmodels.layout import SPLIT_BACKWARD
from costmodels.model_spec import ModelSpec
from costmodels.table import (
    CONTEXT_FORMS,
    RECOMPUTE_KINDS,
    RECOMPUTE_METHODS,
    RECOMPUTE_MODULES,
    Bools,
    LayoutTable,
)


def compiled_covers(model: ModelSpec, table: LayoutTable) -> Bools:
    """Rows, of those whose eager layers are known, whose compiled layers are known too.

    Not known: sequences shared by ranks in fp32, in rings or with latent attention, experts or whole units of
    layers that are computed again, and stages that share a rank. Schedules that split backward never compile.
    """
    wide = table.precision in ("fp32", "tf32")
    plain = table.precision != "fp8" and model.head_dim % 8 == 0
    plain &= not (wide and model.kv_heads < model.heads)
    result: Bools = np.full(len(table), plain) & ~table.offload_activations & ~table.offload_optimizer
    result &= ~table.runs(*SPLIT_BACKWARD) & (table.virtual_pipeline_parallel == 1)
    shares_sequences = not wide and model.latent_attention is None
    result &= (table.context_parallel == 1) | shares_sequences
    result &= table.context_parallel_form != CONTEXT_FORMS.index("ring")
    if model.experts:
        core = 1 << RECOMPUTE_MODULES.index("core_attention")
        attends = table.recompute == RECOMPUTE_KINDS.index("selective")
        attends &= table.recompute_modules == core
        result &= attends | (table.recompute == RECOMPUTE_KINDS.index("none"))
    block = table.recompute_method == RECOMPUTE_METHODS.index("block")
    result &= block | (table.recompute_num_layers == 1)
    return result


@lru_cache(maxsize=1024)
def compiled_layer_tape(structure: Structure) -> UnitTape:
    """One layer."""
    names = (*(name for name in WEIGHTS if name not in ENDS), *VECTORS)
    if structure.experts:
        return replayed_unit(
            structure, names, lambda leaves, x: CompiledMixtureLayer(structure, leaves).forward(x)
        )
    return replayed_unit(structure, names, lambda leaves, x: run_segment(_layer(structure), leaves, [x])[0])


@lru_cache(maxsize=1024)
def _layer(structure: Structure) -> Segment:
    return segment(structure, [RESIDUAL], lambda layer, inputs: [layer.forward(*inputs)])
