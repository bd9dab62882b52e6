"""Measured layers: a factor on what the formulas say of a layer, where its shape was seen to differ.

Which kernels a library chooses for a shape, and how long the host takes to launch them, no formula knows. On
one engine and device it comes back with the shape, whatever the depth of the model and its pipeline.
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

Narrow where kernels change with the shape; wide in tokens, of which larger batches run the same kernels.
"""


SINGLE_STEP = 0.2
"""Share of what is unknown of a layer that one measured step tells: its noise need not be its layers'."""


@lru_cache(maxsize=64)
def _known(measured: tuple[MeasuredLayer, ...]) -> tuple[Floats, Floats, Floats]:
    """Places of the measured layers, [entries, 3], in units of `REACH`, logarithms of factors, and rows."""
    shapes = [(one.hidden, one.tensor_parallel, one.tokens) for one in measured]
    places = np.log2(np.array(shapes, dtype=np.float64)) / REACH
    return places, np.log([one.factor for one in measured]), np.array([float(one.rows) for one in measured])


def _nearest(model: ModelSpec, engine: Engine, table: LayoutTable) -> tuple[Ints, Floats]:
    """Index of the measured shape nearest to each row, [n], and how near that is: 1 the same, 0 far."""
    count = tokens(model, table)
    shapes = np.stack([np.full_like(count, model.hidden), table.tensor_parallel, count], axis=1)
    apart = np.log2(shapes)[:, None, :] / REACH - _known(engine.measured_layers)[0]
    distance = (apart**2).sum(axis=2)
    near: Floats = np.exp(-distance.min(axis=1) / 2)
    return distance.argmin(axis=1), near


def layer_factor(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Measured over formula time of a dense layer, [n]: the nearest shape's, 1 far from all."""
    which, near = _nearest(model, engine, table)
    result: Floats = np.exp(_known(engine.measured_layers)[1][which] * near)
    return result


def measurement_share(model: ModelSpec, engine: Engine, table: LayoutTable) -> Floats:
    """Share of a layer's time that is known from measurements, [n]: 0 by formulas alone, 1 by many steps."""
    if not engine.measured_layers or model.experts:
        return np.zeros(len(table))
    which, near = _nearest(model, engine, table)
    result: Floats = near * (1 - (1 - SINGLE_STEP) ** _known(engine.measured_layers)[2][which])
    return result


def scale_by_measurements(layer: Passes, model: ModelSpec, engine: Engine, table: LayoutTable) -> Passes:
    """A dense layer, all parts of which take `layer_factor` times as long."""
    if not engine.measured_layers:
        return layer
    factor = layer_factor(model, engine, table)
    return replace(layer, **{part.name: getattr(layer, part.name) * factor for part in fields(layer)})
