"""Prior knowledge of an engine's constants, before they are fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.record import Positive, Record
from costmodels.spec.table import Floats

SMALL = 1e-9
"""Keeps the logarithm of a constant that is zero finite."""


class Prior(Record):
    """Knowledge of a constant before the fit."""

    start: float
    within: Positive
    """Likely deviation from `start`, as a natural logarithm."""
    limits: tuple[float, float]
    unseen: float | None = None
    """Value to use without any row of the engine, if `start` already depends on such rows."""


@dataclass(frozen=True)
class Priors:
    """Priors of all constants of a fit; arrays of shape [k]."""

    names: list[str]
    start: Floats
    within: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, constants: Mapping[str, Prior], rows: int, what: str) -> Priors:
        """The priors of a fit; raises `InputError` when `what`, its name, has fewer rows than constants."""
        if rows < len(constants):
            raise InputError(f"{what}: {rows} rows for {len(constants)} constants; give more rows")
        priors = constants.values()
        low, high = (np.array([prior.limits[side] for prior in priors]) for side in (0, 1))
        start = np.array([prior.start for prior in priors])
        return cls(list(constants), start, np.array([prior.within for prior in priors]), low, high)

    def deviations(self, values: Floats) -> Floats:
        """Distances of constants from their priors, in units of the likely deviation, [k]."""
        result: Floats = np.log((values + SMALL) / (self.start + SMALL)) / self.within
        return result

    def named(self, values: Floats) -> dict[str, Any]:
        """Values by the names of the constants."""
        return dict(zip(self.names, values.tolist(), strict=True))


def round_constants(constants: Mapping[str, float], digits: int) -> dict[str, float]:
    """Constants rounded to the digits that are written to files."""
    return {name: float(f"{value:.{digits}g}") for name, value in constants.items()}


def scipy_optimize() -> Any:
    """The module scipy.optimize; `InputError` if scipy is not installed."""
    try:
        import scipy.optimize
    except ImportError:
        raise InputError("fitting needs scipy: pip install 'llm-parallelism-planner[calibrate]'") from None
    return scipy.optimize
