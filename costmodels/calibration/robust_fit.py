"""A fit of a few constants to a few errors; it needs only numpy, so it runs on training machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from costmodels.spec.table import Floats

STEP = 0.02
"""Relative step of derivatives."""

FARTHEST = 1.0
"""Largest change of a constant's logarithm in one step."""

STEPS, TRIES = 10, 5


class Knowledge(NamedTuple):
    """The prior of a positive constant: its value before the fit, its width and its bounds."""

    start: float
    within: float
    """Likely deviation, as a natural logarithm."""
    least: float
    most: float


def robust_fit(
    known: Mapping[str, Knowledge], errors: Callable[[Mapping[str, float]], Floats], tolerance: float
) -> dict[str, float]:
    """The constants with the least `errors`, each weighed against its prior.

    The method is Levenberg and Marquardt's on logarithms, with Huber's loss. Errors beyond `tolerance` count
    in proportion, not squared, so outliers have little effect.

    Args:
        errors: errors of all rows, as natural logarithms, [n], by the values of the constants.
        tolerance: error of a row with the same weight as a constant's likely deviation.
    """
    names = list(known)
    low, high = (np.log([getattr(one, side) for one in known.values()]) for side in ("least", "most"))
    start = np.clip(np.log([max(one.start, 1e-12) for one in known.values()]), low, high)
    within = np.array([one.within for one in known.values()])

    def named(logs: Floats) -> dict[str, float]:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def loss(missed: Floats, logs: Floats) -> float:
        apart = np.abs(missed) / tolerance
        rows = np.where(apart < 1, apart**2, 2 * apart - 1).sum()
        return float(rows + (((logs - start) / within) ** 2).sum())

    logs, damping = start, 1e-2
    missed = errors(named(logs))
    for _ in range(STEPS):
        # Into the limits, not out of them.
        steps = np.where(logs + STEP > high, -STEP, STEP)
        slopes = np.stack(
            [
                (errors(named(logs + step * unit)) - missed) / step
                for step, unit in zip(steps, np.eye(len(names)), strict=True)
            ],
            axis=1,
        )
        weight = 1.0 / (np.sqrt(np.maximum(1.0, np.abs(missed) / tolerance)) * tolerance)
        matrix = np.concatenate([slopes * weight[:, None], np.diag(1.0 / within)])
        right = np.concatenate([-missed * weight, (start - logs) / within])
        scale = np.diag(np.linalg.norm(matrix, axis=0))
        before = loss(missed, logs)
        for _ in range(TRIES):
            damped = np.concatenate([matrix, np.sqrt(damping) * scale])
            change = np.linalg.lstsq(damped, np.concatenate([right, np.zeros(len(names))]), rcond=None)[0]
            trial = np.clip(logs + np.clip(change, -FARTHEST, FARTHEST), low, high)
            trial_missed = errors(named(trial))
            if loss(trial_missed, trial) < before:
                break
            damping *= 4
        else:
            break
        gained = before - loss(trial_missed, trial)
        logs, missed, damping = trial, trial_missed, damping / 3
        if gained < 1e-3 * before:
            break
    return named(logs)
