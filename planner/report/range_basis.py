"""The basis of the range of a plan's step time, in words."""

from __future__ import annotations

import numpy as np

from costmodels.catalogue import calibrated_fits
from costmodels.time.uncertainty import causes
from planner.plan import Plan

CAUSES = {
    "base": "the kernels",
    "narrow": "a narrow model",
    "network": "the network",
    "launch": "the host",
    "bubble": "the pipeline's waits",
}
"""Causes that widen a range; the order decides between equal ones."""

LEAST = 0.005
"""Least width of a cause that is named, as a natural logarithm."""


def range_basis(plan: Plan) -> str:
    """A text on the measured runs to which the constants were fitted, and on the width that each cause
    adds."""
    estimate = plan.estimate
    time = {name: np.array([seconds]) for name, seconds in estimate.time.model_dump().items()}
    engine = plan.engine.for_device(plan.cluster.device)
    widths = causes(
        *(plan.cluster, engine, time, np.array([estimate.step_time_s])),
        hidden=plan.model.hidden,
        experts=plan.model.experts > 0,
    )
    told = {CAUSES[name]: float(width[0]) for name, width in widths.items() if width[0] >= LEAST}
    parts = ", ".join(f"{name} {100 * width:.0f} %" for name, width in sorted(told.items(), key=_by_width))
    low, high = (
        round(100 * (seconds / estimate.step_time_s - 1))
        for seconds in (estimate.step_time_low_s, estimate.step_time_high_s)
    )
    return f"It reaches from {low} % to +{high} %: {parts}, combined as root-sum-square. {_fit(plan)}"


def _by_width(item: tuple[str, float]) -> float:
    return -item[1]


def _fit(plan: Plan) -> str:
    """A sentence on the measured runs to which the constants of the engine on the device were fitted."""
    engine, device = plan.engine.name, plan.cluster.device
    found = calibrated_fits().get(engine, {}).get(device.architecture)
    if found is None:
        return (
            f"The engine's constants for {device.name} are not fitted to measured runs; "
            "`planner calibrate` measures a machine."
        )
    if "rows" not in found:
        # Ranges are measured where constants are another engine's, or are the catalogue's alone.
        return (
            f"The engine's constants for {device.name} were not fitted to runs of its own; how wide the "
            "range is comes from measured runs that no fit has seen."
        )
    text = (
        f"The engine's constants were fitted to {found['rows']} measured runs ({', '.join(found['sources'])})"
    )
    if "held_out" in found:
        error = found["held_out"]["median_ape"]
        text += f"; runs that a fit has not seen are missed by {error:.1f} % in the median"
    return f"{text}."
