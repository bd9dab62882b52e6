"""Errors of the model's memory on a source of measurements that no memory constant has seen.

Memory constants of few engines are fitted to published peaks (memory_fits.yaml). When a source is left out,
they are fitted to the others, or keep their prior values. All other constants of memory follow from the code
of an engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.calibration.left_out_sources import FEWEST
from benchmarks.calibration.measurements import EngineLoader, Measurement, named_engine
from benchmarks.calibration.memory_fit import MemoryFitPlan, fit_memory, has_memory
from benchmarks.calibration.memory_peaks import MEMORY_KINDS, published_peak
from benchmarks.calibration.predictions import MemoryPredictions, predict_memory
from benchmarks.calibration.scores import MemoryScore, OomScore, is_fit_row, memory_score, oom_score
from benchmarks.calibration.unseen_spread import COVERAGE, FEW, weighted_quantile
from costmodels.dataclass import dataclass
from costmodels.spec.engine import Engine

LEAST_SPREAD = 0.03
"""Least width of the range of an engine's peaks, which versions of libraries alone cause.

`FEW` is added for one row, half of it for two rows, and so on.
"""


@dataclass(frozen=True)
class UnseenMemory:
    """A source whose memory is predicted by constants that have not seen it."""

    memory: MemoryScore
    oom: OomScore
    rows: list[Measurement]
    predictions: MemoryPredictions


def memory_without(
    plans: Sequence[MemoryFitPlan], rows: Sequence[Measurement], source: str
) -> dict[str, dict[str, Any]]:
    """Constants of the engines whose fits use `source`, fitted without it."""
    found = {}
    for plan in plans:
        if source not in plan.sources:
            continue
        seen = [row for row in rows if row.source != source and has_memory(row, plan) and is_fit_row(row)]
        if len(seen) >= FEWEST * len(plan.constants):
            found[plan.engine] = fit_memory(plan, seen).constants
        else:
            found[plan.engine] = {name: prior.start for name, prior in plan.constants.items()}
    return found


def loader_with(constants: Mapping[str, Mapping[str, Any]]) -> EngineLoader:
    """Engines with other constants, by the names of the engines."""

    def load(name: str) -> Engine:
        engine = named_engine(name)
        return engine.with_constants(constants[name]) if name in constants else engine

    return load


def says_memory(row: Measurement) -> bool:
    """Return whether a row publishes a peak or ran out of memory."""
    return row.oom or any(published_peak(row, kind) for kind in MEMORY_KINDS)


def unseen_memory(source: str, rows: Sequence[Measurement]) -> UnseenMemory:
    """The errors of one source, whose rows were read with the engines of `loader_with`."""
    own = [row for row in rows if row.source == source]
    predictions = predict_memory(own)
    ran = [place for place, row in enumerate(own) if not row.oom]
    lived = np.array([not row.oom for row in own], dtype=bool)
    return UnseenMemory(
        memory=memory_score(own, predictions, ran),
        oom=oom_score(predictions.fits, lived),
        rows=own,
        predictions=predictions,
    )


def memory_spreads(found: Sequence[UnseenMemory]) -> dict[str, float]:
    """`Engine.memory_spread` of each engine with published peaks that others measured.

    Rows of one model on one device weigh as much as one.
    """
    missed: defaultdict[str, list[tuple[tuple[str, str, str], float]]] = defaultdict(list)
    for one in found:
        for place, row in enumerate(one.rows):
            kind = next((kind for kind in MEMORY_KINDS[:3] if published_peak(row, kind)), None)
            if row.oom or kind is None:
                continue
            peak = published_peak(row, kind) or np.nan
            ratio = float(getattr(one.predictions, f"{kind}_bytes")[place]) / peak
            if np.isfinite(ratio):
                recipe = row.source, row.model.name, row.cluster.device.name
                missed[row.engine.name].append((recipe, abs(float(np.log(ratio)))))
    result = {}
    for engine, rows in sorted(missed.items()):
        recipes = [recipe for recipe, _ in rows]
        weights = np.array([1 / recipes.count(recipe) for recipe in recipes])
        width = weighted_quantile(np.array([error for _, error in rows]), weights, COVERAGE)
        result[engine] = round(max(width, LEAST_SPREAD + FEW / len(rows)), 3)
    return result
