"""Measured layers: a correction factor of a layer's predicted time, for shapes that were measured.

No formula knows the kernels that a library chooses for a shape, or the host's time to launch them. On one
engine and device this factor depends on the shape, and not on the model's depth or pipeline.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

import numpy as np

from costmodels.layers.shapes import tokens
from costmodels.spec.engine import Engine, MeasuredLayer
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable
from costmodels.time.passes import Passes

REACH = (0.125, 0.125, 1.0)
"""Octaves of hidden size, of tensor-parallel ranks and of tokens within which a correction fades by e^-1/2.

It is narrow in dimensions where kernels change with the shape, and wide in tokens, as larger batches run the
same kernels.
"""


SINGLE_STEP = 0.2
"""Share of a layer's uncertainty that one measured step removes, as a step has noise of its own."""


@lru_cache(maxsize=64)
def _known(measured: tuple[MeasuredLayer, ...]) -> tuple[Floats, Floats, Floats]:
    """Coordinates of the measured layers, [entries, 3], in units of `REACH`; logarithms of their factors; and
    their numbers of measured steps."""
    shapes = [(one.hidden, one.tensor_parallel, one.tokens) for one in measured]
    places = np.log2(np.array(shapes, dtype=np.float64)) / REACH
    return places, np.log([one.factor for one in measured]), np.array([float(one.rows) for one in measured])


def _nearest(model: ModelSpec, engine: Engine, table: LayoutTable) -> tuple[Ints, Floats]:
    """Index of the measured shape nearest to each row, [n], and its similarity: 1 for the same shape, 0 for a
    distant one."""
    count = tokens(model, table)
    shapes = np.stack([np.full_like(count, model.hidden), table.tensor_parallel, count], axis=1)
    apart = np.log2(shapes)[:, None, :] / REACH - _known(engine.measured_layers)[0]
    distance = (apart**2).sum(axis=2)
    near: Floats = np.exp(-distance.min(axis=1) / 2)
    return distance.argmin(axis=1), near


def layer_factor(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Measured over predicted time of a dense layer, [n]: that of the nearest shape, or 1 far from all."""
    which, near = _nearest(model, engine, table)
    result: Floats = np.exp(_known(engine.measured_layers)[1][which] * near)
    return result


def measurement_share(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Share of a layer's time that is known from measurements, [n]: 0 for formulas alone, 1 for many measured
    steps."""
    if not engine.measured_layers or model.experts:
        return np.zeros(len(table))
    which, near = _nearest(model, engine, table)
    result: Floats = near * (1 - (1 - SINGLE_STEP) ** _known(engine.measured_layers)[2][which])
    return result


def scale_by_measurements(layer: Passes, model: ModelSpec, engine: Engine, table: LayoutTable) -> Passes:
    """A dense layer with all parts multiplied by `layer_factor`."""
    if not engine.measured_layers:
        return layer
    factor = layer_factor(model, engine, table)
    return replace(layer, **{part.name: getattr(layer, part.name) * factor for part in fields(layer)})
