"""Errors of the model on a source of measurements that its constants have never seen.

The constants of each engine are fitted without the source (leave one source out), and the source is priced
with them. If a fit has no other source, its constants keep their prior values. These are the starts of
fits.yaml, taken from kernels and from other engines, or common values. Constants that a fit takes over from
another (`like`) are fitted without the source as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.calibration.layer_factors import fit_layers
from benchmarks.calibration.measurements import EngineLoader, Measurement
from benchmarks.calibration.predictions import Predictions, predict
from benchmarks.calibration.scores import SourceScore, is_fit_row, score
from benchmarks.calibration.time_fit import TimeFitPlan, fit_times, is_row_of
from costmodels.catalogue import Fits, calibrated_fits, load_engine
from costmodels.dataclass import dataclass
from costmodels.spec.engine import Engine
from costmodels.spec.table import Floats

FEWEST = 1
"""Fewest rows of other sources for each constant of a fit that replace prior values.

A prior weighs as much as one row with the fit's tolerance as its error, so that few rows change the constants
little."""


@dataclass(frozen=True)
class UnseenSource:
    """A source, priced by constants that have not seen it."""

    score: SourceScore
    rows: list[Measurement]
    predictions: Predictions

    @property
    def errors(self) -> Floats:
        """Natural logarithms of predicted over measured step time, [n]; NaN where one is not known."""
        measured = np.log([row.step_time_s or np.nan for row in self.rows])
        found: Floats = np.log(self.predictions.step_time_s) - measured
        return found


def constants_without(plan: TimeFitPlan, rows: Sequence[Measurement], source: str) -> dict[str, Any]:
    """The constants of a fit whose rows leave `source` out."""
    seen = [row for row in rows if row.source != source and is_row_of(row, plan) and is_fit_row(row)]
    if len(seen) < FEWEST * len(plan.constants):
        priors = plan.constants.items()
        return {name: prior.start if prior.unseen is None else prior.unseen for name, prior in priors}
    found = fit_times(plan, seen)
    return (found.with_layers(fit_layers(found, seen)) if plan.layers else found).constants


def fits_without(plans: Sequence[TimeFitPlan], rows: Sequence[Measurement], source: str) -> Fits:
    """The content of calibrated.yaml with fits that leave out `source`; ranges are unchanged."""
    fits: dict[str, dict[str, Any]] = {engine: dict(each) for engine, each in calibrated_fits().items()}
    for plan in plans:
        if source in plan.sources:
            known = fits.setdefault(plan.engine, {}).get(plan.architecture, {"spread": {}})
            constants = constants_without(plan, rows, source)
            fits[plan.engine][plan.architecture] = {**known, "constants": constants}
    return fits


def loader(fits: Fits) -> EngineLoader:
    """Engines with the constants of `fits`."""
    engines: dict[str, Engine] = {}

    def load(name: str) -> Engine:
        if name not in engines:
            engines[name] = load_engine(name, fits)
        return engines[name]

    return load


def unseen_source(source: str, rows: Sequence[Measurement]) -> UnseenSource:
    """The errors of one source, whose rows were read with the engines of `fits_without`."""
    ran = [row for row in rows if row.source == source]
    predictions = predict(ran)
    scores: Mapping[str, SourceScore] = score(ran, predictions)
    return UnseenSource(scores[source], ran, predictions)
