"""Changes of one kind that make a given layout fit, with the rest of the layout unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from costmodels.spec.layout import Layout
from planner.inputs.pins import Pins, degrees_of
from planner.problem import Problem
from planner.proposals.fits import Budget, first_that_fits
from planner.proposals.proposal import Changed, Proposal

SAVERS: Mapping[str, tuple[str, ...]] = {
    "recomputation": ("recompute", "recompute_modules", "recompute_method", "recompute_num_layers"),
    "ZeRO": ("zero_stage", "zero_replicas"),
    "offload": ("offload_activations", "offload_optimizer"),
    "microbatches": ("micro_batch_size",),
    "sequence parallelism": ("sequence_parallel",),
}
"""Degrees that save bytes without moving devices, by their names in proposals."""

ROWS = 100_000
"""Most legal layouts that are examined; one mesh has a few hundred."""


def own_layout_proposals(problem: Problem, layout: Layout) -> list[Proposal]:
    """Proposals that change one of `SAVERS` in the layout, one for each of them that makes it fit."""
    budget = Budget(ROWS)
    found: list[Proposal] = []
    whole = {**problem.pins, **degrees_of(layout)}
    for fixed in ("precision", "global_batch_size"):
        whole.pop(fixed, None)
    for name, degrees in SAVERS.items():
        pins: Pins = {degree: value for degree, value in whole.items() if degree not in degrees}
        asked = replace(problem, pins=pins)
        what = f"with other {name}, all else as it is"
        found += first_that_fits([Changed("pin", what, (), {"pin": pins}, asked)], budget)
    return found
