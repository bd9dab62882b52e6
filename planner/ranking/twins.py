"""Twins: layouts that differ in their notation, but have the same estimates."""

from __future__ import annotations

from math import isclose

from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout

FORMS = {"zero_stage": "zero", "context_parallel_form": "cp_form"}
"""Degrees in which twins may differ, by their names in the notation of plans."""

SAME = 1e-9
"""Largest relative difference of estimates that rounding errors cause."""


def other_form(one: tuple[Layout, Estimate], other: tuple[Layout, Estimate]) -> str | None:
    """The forms that a twin of `one` has instead of its own; None where `other` is no twin."""
    (layout, cost), (other_layout, other_cost) = one, other
    if not isclose(cost.step_time_s, other_cost.step_time_s, rel_tol=SAME):
        return None
    if not isclose(cost.peak_memory_bytes, other_cost.peak_memory_bytes, rel_tol=SAME):
        return None
    forms = {name: getattr(other_layout, name) for name in FORMS}
    if layout.model_copy(update=forms) != other_layout:
        return None
    mine = {name: getattr(layout, name) for name in FORMS}
    return " ".join(f"{FORMS[name]} {form}" for name, form in forms.items() if form != mine[name])
