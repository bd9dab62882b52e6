"""Fitting an engine's memory constants to measured peaks and to which jobs ran out of memory.

Peaks count by the logarithm of predicted over measured bytes, with Cauchy's loss: fragmentation makes a few
peaks twice as high. A job with a known outcome (ran, or out of memory) counts by the distance of its
predicted peak on the wrong side of the device's memory (logistic loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.calibration.measurements import Measurement, table_groups
from benchmarks.calibration.memory_peaks import predicted_peaks, published_peak
from benchmarks.calibration.priors import Prior, Priors, round_constants, scipy_optimize
from benchmarks.calibration.tables import table
from costmodels.dataclass import dataclass
from costmodels.ranks.rank_layers import Ranks, ranks_of_table
from costmodels.spec.engine import Engine
from costmodels.spec.record import Positive, Record
from costmodels.spec.table import Bools, Floats, LayoutTable

EVALUATIONS = 4000
"""Most evaluations of all rows."""

KINDS = ("reserved", "device", "allocated")
"""Kinds of published peaks; the first one that a row has is fitted."""

SHARPNESS = 0.5
"""Scale of the logistic loss, in tolerances: a peak that far on the wrong side counts about 1.3."""


class MemoryFitPlan(Record):
    """One fit of `memory_fits.yaml`."""

    engine: str
    sources: tuple[str, ...]
    tolerance: Positive
    """Error of a peak, as a natural logarithm, at which rows begin to count as outliers."""
    constants: dict[str, Prior]


@dataclass(frozen=True)
class MemoryFit:
    """Result of one fit."""

    constants: dict[str, float]
    rows: int


def memory_fit_plans() -> list[MemoryFitPlan]:
    """The fits that `memory_fits.yaml` lists."""
    return [MemoryFitPlan.model_validate(fields) for fields in table("memory_fits.yaml")["fits"]]


def has_memory(measurement: Measurement, plan: MemoryFitPlan) -> bool:
    """Return whether a row has data about the memory of the engine of `plan`."""
    return measurement.engine.name == plan.engine and measurement.source in plan.sources


def fit_memory(plan: MemoryFitPlan, measurements: Sequence[Measurement]) -> MemoryFit:
    """The constants that agree best with the memory of `measurements` and with their priors.

    Raises:
        InputError: scipy is not installed, or there are fewer rows than constants.
    """
    minimize = scipy_optimize().minimize
    priors = Priors.of(plan.constants, len(measurements), f"memory fit of {plan.engine}")
    low, high = priors.low, priors.high
    batches = _batches(measurements)

    def loss(values: Floats) -> float:
        chosen = np.clip(values, low, high)
        misses = sum(_misses(batch, priors.named(chosen), plan.tolerance) for batch in batches)
        known = 0.5 * np.square(priors.deviations(chosen)).sum()
        outside = np.square((values - chosen) / (high - low)).sum()
        return float(misses + known + 1e3 * outside)

    options = {"maxfev": EVALUATIONS, "xtol": 1e-3, "ftol": 1e-5}
    values = np.clip(minimize(loss, priors.start, method="Powell", options=options).x, low, high)
    return MemoryFit(round_constants(priors.named(values), 3), len(measurements))


@dataclass(frozen=True)
class _Batch:
    """Rows whose memory is computed together. Arrays of shape [n]."""

    first: Measurement
    engine: Engine
    table: LayoutTable
    ranks: Ranks
    kind: str
    """Kind of the measured bytes, of `MEMORY_KINDS`."""
    measured: Floats
    """Measured bytes; NaN where none are published."""
    first_rank_only: Bools
    oom: Bools


def _batches(measurements: Sequence[Measurement]) -> list[_Batch]:
    result = []
    for places in table_groups(measurements):
        rows = [measurements[place] for place in places]
        first, table = rows[0], LayoutTable.of([row.layouts[0] for row in rows])
        kind = next((kind for kind in KINDS if any(published_peak(row, kind) for row in rows)), KINDS[0])
        result.append(
            _Batch(
                first=first,
                engine=first.engine.for_device(first.cluster.device),
                table=table,
                ranks=ranks_of_table(first.model, table),
                kind=kind,
                measured=np.array([published_peak(row, kind) or np.nan for row in rows]),
                first_rank_only=np.array([row.first_rank_only for row in rows]),
                oom=np.array([row.oom for row in rows]),
            )
        )
    return result


def _misses(batch: _Batch, constants: dict[str, Any], tolerance: float) -> float:
    """Loss of the rows of a batch."""
    engine, cluster = batch.engine.with_constants(constants), batch.first.cluster
    found = predicted_peaks(batch.first.model, cluster, engine, batch.table, batch.ranks)
    peak = np.where(batch.first_rank_only, found[batch.kind][:, 0], found[batch.kind].max(axis=1))
    error = np.log(peak / batch.measured) / tolerance
    over = np.log(found["device"].max(axis=1) / cluster.memory_bytes) / (SHARPNESS * tolerance)
    side = np.logaddexp(0.0, np.where(batch.oom, -over, over))
    return float(np.where(np.isnan(error), side, np.log1p(np.square(error))).sum())
