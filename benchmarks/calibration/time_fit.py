"""Fitting an engine's constants for one device architecture to measured step times.

Few constants, each with its prior knowledge, and residuals in log space. A step that is 10 % too long counts
as much as one that is 10 % too short, however long it takes. Unexplained rows must not distort the constants.
Therefore a fit with a convex loss (soft L1) is followed by one with Cauchy's loss, in which large residuals
count less and less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from benchmarks.calibration.measurements import Measurement, table_groups
from benchmarks.calibration.priors import Prior, Priors, round_constants, scipy_optimize
from benchmarks.calibration.tables import table
from costmodels.dataclass import dataclass
from costmodels.rank_costs import RankCosts
from costmodels.spec.engine import Engine, MeasuredLayer
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import Positive, Record
from costmodels.spec.table import Floats, LayoutTable
from costmodels.step_times import step_seconds

EVALUATIONS = 12
"""Most evaluations of all rows for one loss, those of derivatives not counted."""

NEAR = 1e-3
"""Relative change of the loss, or of the constants, at which a fit ends; much smaller than the errors of
measurements."""

STEP = 1e-3
"""Step of the derivatives, as a share of a constant's limits."""


class TimeFitPlan(Record):
    """One fit of `fits.yaml`."""

    engine: str
    architecture: str
    sources: tuple[str, ...]
    tolerance: Positive
    weights: dict[str, Positive] = Field(default_factory=dict)
    """Factor of the errors of a source's rows, so that they also count as outliers sooner; otherwise 1."""
    layers: bool = False
    """True if layers are also corrected by their shape (`benchmarks/calibration/layer_factors.py`)."""
    constants: dict[str, Prior]


@dataclass(frozen=True)
class TimeFit:
    """Result of one fit."""

    plan: TimeFitPlan
    constants: dict[str, Any]
    rows: int

    def with_layers(self, layers: tuple[MeasuredLayer, ...]) -> TimeFit:
        """The fit with corrections of layers by their shape."""
        return replace(self, constants={**self.constants, "measured_layers": layers})


def time_fit_plans() -> list[TimeFitPlan]:
    """The fits that `fits.yaml` lists."""
    return [TimeFitPlan.model_validate(fields) for fields in table("fits.yaml")["fits"]]


def log_errors(found: TimeFit, measurements: Sequence[Measurement]) -> Floats:
    """Natural logarithms of predicted over measured step time, [n]."""
    measured = np.log([row.step_time_s or np.nan for row in measurements])
    predicted = _step_times(_batches(measurements), found.constants, len(measured))
    result: Floats = np.log(predicted) - measured
    return result


@dataclass(frozen=True)
class _Batch:
    """Rows that are priced together."""

    model: ModelSpec
    cluster: Cluster
    engine: Engine
    table: LayoutTable
    rows: list[int]


def _batches(measurements: Sequence[Measurement]) -> list[_Batch]:
    result = []
    for rows in table_groups(measurements):
        first = measurements[rows[0]]
        table = LayoutTable.of([measurements[row].layouts[0] for row in rows])
        engine = first.engine.for_device(first.cluster.device)
        # Corrections of an earlier fit are not what this one starts from.
        engine = engine.model_copy(update={"measured_layers": ()})
        result.append(_Batch(first.model, first.cluster, engine, table, rows))
    return result


def _step_times(batches: Sequence[_Batch], constants: dict[str, Any], count: int) -> Floats:
    result = np.empty(count)
    for batch in batches:
        engine = batch.engine.with_constants(constants)
        costs = RankCosts.of(batch.model, batch.cluster, engine, batch.table)
        result[batch.rows] = sum(step_seconds(costs).values(), np.zeros(len(batch.table)))
    return result


def is_row_of(measurement: Measurement, plan: TimeFitPlan) -> bool:
    """Return whether `plan` may be fitted to a row."""
    return (
        measurement.source in plan.sources
        and measurement.step_time_s is not None
        and measurement.certain
        and measurement.engine.name == plan.engine
        and measurement.cluster.device.architecture == plan.architecture
    )


def fit_times(plan: TimeFitPlan, measurements: Sequence[Measurement]) -> TimeFit:
    """The constants that bring the predicted step times of `measurements` nearest to the measured ones.

    Raises:
        InputError: scipy is not installed, or there are fewer rows than constants.
    """
    least_squares = scipy_optimize().least_squares
    priors = Priors.of(plan.constants, len(measurements), f"fit of {plan.engine} on {plan.architecture}")
    low, high = priors.low, priors.high
    measured = np.log([row.step_time_s or np.nan for row in measurements])
    weights = np.array([plan.weights.get(row.source, 1.0) for row in measurements])
    batches = _batches(measurements)

    def residuals(shares: Floats) -> Any:
        values = low + shares * (high - low)
        predicted = _step_times(batches, priors.named(values), len(measured))
        errors = weights * (np.log(predicted) - measured)
        # A constant that deviates as far as is likely weighs as much as one row at the tolerance.
        return np.concatenate([errors, plan.tolerance * priors.deviations(values)])

    shares = (priors.start - low) / (high - low)
    for loss in (_soft_l1, _cauchy):

        def robust(squares: Floats, of_rows: Any = loss) -> Floats:
            """Value and derivatives: a robust loss of rows, plus the squared distances of constants from
            their priors."""
            rows, known = squares[: len(measured)], squares[len(measured) :]
            plain = np.array([known, np.ones_like(known), np.zeros_like(known)])
            return np.concatenate([of_rows(rows), plain], axis=1)

        found = least_squares(
            residuals,
            shares,
            bounds=(0.0, 1.0),
            loss=robust,
            f_scale=plan.tolerance,
            diff_step=STEP,
            max_nfev=EVALUATIONS,
            ftol=NEAR,
            xtol=NEAR,
        )
        shares = np.clip(found.x, 0.0, 1.0)
    constants = round_constants(priors.named(low + shares * (high - low)), 4)
    return TimeFit(plan, constants, len(measurements))


def _soft_l1(squares: Floats) -> Floats:
    root = np.sqrt(1.0 + squares)
    return np.array([2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3])


def _cauchy(squares: Floats) -> Floats:
    more = 1.0 + squares
    return np.array([np.log(more), 1.0 / more, -1.0 / more**2])
