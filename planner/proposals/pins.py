"""Pins that exclude layouts that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from costmodels.spec.layout import SHORT_NAMES
from planner.inputs.pin_notation import pin_groups, pins_text
from planner.inputs.pins import Pins
from planner.problem import Problem
from planner.proposals.fits import Budget, first_that_fits, may_fit
from planner.proposals.proposal import Changed, Proposal

BYTES_FIRST = (
    *("recompute", "zero_stage", "zero_replicas", "offload_activations", "offload_optimizer"),
    *("micro_batch_size", "sequence_parallel"),
)
"""Pins whose removal saves bytes and needs no more devices, in the order of trial."""

MOST_PINS = 3
"""Largest number of proposals that each remove a single pin."""

SHORT = {name: short for short, name in SHORT_NAMES.items()}
"""Short names of degrees."""


def pin_proposals(problem: Problem, budget: Budget) -> list[Proposal]:
    """Proposals to remove one pin, at most `MOST_PINS`; if no single pin is enough, the fewest pins
    together."""
    groups = sorted(pin_groups(problem.pins), key=_is_of_bytes)
    alone = [_without(problem, [group]) for group in groups]
    found: list[Proposal] = []
    for changed in alone:
        if len(found) < MOST_PINS:
            found += first_that_fits([changed], budget)
    if found or len(groups) < 2:
        return found
    dropped = list(groups)
    for group in reversed(groups):
        fewer = [one for one in dropped if one is not group]
        if may_fit(_without(problem, fewer).problem):
            dropped = fewer
    return first_that_fits([_without(problem, dropped)], budget)


def _is_of_bytes(group: Pins) -> int:
    return min(BYTES_FIRST.index(name) if name in BYTES_FIRST else len(BYTES_FIRST) for name in group)


def _without(problem: Problem, groups: Sequence[Pins]) -> Changed:
    """The question without some groups of pins."""
    left_out: Pins = {name: value for group in groups for name, value in group.items()}
    others = {name: value for name, value in problem.pins.items() if name not in left_out}
    names = [next(iter(group)) for group in groups]
    flags = [word for name in names for word in ("--unpin", SHORT.get(name, name))]
    many = "s" * (len(left_out) > 1)
    what = f"without the pin{many} {pins_text(left_out)}" if others else f"without the pin{many}"
    if len(groups) == 1:
        what = f"without the pin{many} {pins_text(left_out)}"
    return Changed(
        "pin", what, tuple(flags), keywords_of_pins(problem, others), replace(problem, pins=others)
    )


def keywords_of_pins(problem: Problem, pins: Pins) -> dict[str, Any]:
    """Keywords that pin only `pins`, and keep all other keywords."""
    batch = problem.batch
    return {
        "pin": pins,
        "forbid": None,
        "precision": problem.precision,
        "global_batch_size": None if batch.maximum else batch.size,
        "max_global_batch_size": batch.size if batch.maximum else None,
    }
