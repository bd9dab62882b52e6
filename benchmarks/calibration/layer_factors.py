"""Factors of layer times by the shape of a layer, fitted to measured steps in addition to an engine's
constants."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.time_fit import TimeFit, log_errors
from costmodels.spec.engine import MeasuredLayer

ROUNDS = 4
"""Newton steps; the time of a step is nearly linear in that of its layers."""

NUDGE = 0.01
"""Change of the logarithm of a factor by which the share of layers in a step is found."""

DOUBT = 0.5
"""Weight of the prior belief that a factor is 1, in rows."""

LARGEST = 0.35
"""Largest logarithm of a factor. Shapes beyond it get no factor, as their steps were slow for another
reason."""

Shape = tuple[int, int, int]
"""Hidden size, tensor-parallel ranks and tokens of a microbatch on a device."""


def _shape(measurement: Measurement) -> Shape:
    layout = measurement.layouts[0]
    tokens = layout.micro_batch_size * measurement.model.seq // layout.context_parallel
    return measurement.model.hidden, layout.tensor_parallel, tokens


def _layers(logs: Mapping[Shape, float]) -> tuple[MeasuredLayer, ...]:
    return tuple(
        MeasuredLayer(hidden=hidden, tensor_parallel=tp, tokens=tokens, factor=math.exp(log))
        for (hidden, tp, tokens), log in sorted(logs.items())
    )


def fit_layers(found: TimeFit, measurements: Sequence[Measurement]) -> tuple[MeasuredLayer, ...]:
    """Factors of the layers' times, one a shape, that bring its rows nearest to their measured step times.

    Least squares of the logarithms of each shape's rows, then shrunk towards 1 by n / (n + `DOUBT`) for n
    rows. The shrinkage is because the error of a single row may have other causes than its layers.
    """
    alike: dict[Shape, list[int]] = defaultdict(list)
    for row, measurement in enumerate(measurements):
        if not measurement.model.experts:
            alike[_shape(measurement)].append(row)
    logs = dict.fromkeys(alike, 0.0)
    for _ in range(ROUNDS):
        over = log_errors(found.with_layers(_layers(logs)), measurements)
        moved = log_errors(found.with_layers(_layers({k: v + NUDGE for k, v in logs.items()})), measurements)
        share = (moved - over) / NUDGE
        for shape, rows in alike.items():
            weight = share[rows]
            logs[shape] -= float((weight * over[rows]).sum() / (weight * weight).sum())
            logs[shape] = float(np.clip(logs[shape], -1.0, 1.0))
    shrunk = {shape: log * len(alike[shape]) / (len(alike[shape]) + DOUBT) for shape, log in logs.items()}
    kept = {shape: log for shape, log in shrunk.items() if abs(log) < LARGEST}
    return tuple(
        layer.model_copy(update={"factor": round(layer.factor, 3), "rows": len(alike[shape])})
        for shape, layer in zip(sorted(kept), _layers(kept), strict=True)
    )
