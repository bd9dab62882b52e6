"""The work and the size of a multi-token prediction module beyond its layer and the head (DeepSeek-V3,
section 2.2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.layers.operators import Gemm, Operators, embedding
from costmodels.layers.shapes import element_bytes, tokens
from costmodels.spec.engine import Engine
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, LayoutTable


def joining(model: ModelSpec, engine: Engine, table: LayoutTable) -> Operators:
    """Forward work on a token's embedding and a position's state: norms of both, one matrix, and a last norm.

    Every tensor-parallel rank has the whole matrix; with sequence parallelism it has only its own tokens.
    """
    e, one = element_bytes(table.precision), np.ones(len(table))
    own = tokens(model, table) / np.where(table.sequence_parallel, table.tensor_parallel, 1)
    lookup, whole = embedding(model, table), e * own * model.hidden
    # A norm reads and writes; both inputs are read and written once more to lie side by side.
    norms = 3 * 2 * engine.elementwise.norm_passes / 2 * whole
    return replace(
        lookup,
        gemms=(Gemm(own, 2 * model.hidden * one, model.hidden * one, one),),
        elementwise_forward=lookup.elementwise_forward + norms + 4 * whole,
        elementwise_backward=lookup.elementwise_backward + 1.5 * norms + 4 * whole,
        norm_bytes=norms,
    )


def joining_parameters(model: ModelSpec) -> int:
    """Parameters of a module outside of its layer, which every tensor-parallel rank holds."""
    return 2 * model.hidden**2 + 3 * model.norm_parameters


def joining_bytes(model: ModelSpec, table: LayoutTable) -> Floats:
    """Bytes that a module keeps of a microbatch besides its layer and the loss.

    These are the inputs of its three norms, both inputs concatenated, and the gathered input of the head.
    """
    e, t = element_bytes(table.precision), tokens(model, table)
    own = t / np.where(table.sequence_parallel, table.tensor_parallel, 1)
    result: Floats = e * model.hidden * (5 * own + t)
    return result
