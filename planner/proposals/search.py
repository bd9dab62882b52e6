"""The proposals of a question of which nothing fits, in the order in which an engineer would take them.

Fewer bytes come first: pins that hold recomputation, ZeRO or offload back, and an optimizer of fewer bytes.
Then adapters in the place of the model, more devices, shorter sequences, a number format of fewer bits, and
devices with more memory. Whether a change may fit is asked of the layouts that need least memory. What may is
searched as every question is, so that the price is that of the plan which the changed question gives.
"""

from __future__ import annotations

from planner.proposals.devices import device_counts, larger_devices
from planner.proposals.fits import Budget, first_that_fits
from planner.proposals.pins import pin_proposals
from planner.proposals.proposal import Proposal
from planner.proposals.training import adapters, optimizers, precisions, sequences
from planner.ranking.result import SearchResult

SEARCHES = 5
"""Searches of the question that the proposals take as long as, about."""

FEWEST_ROWS = 200_000
"""Legal layouts that are looked at for all proposals at least: a few seconds."""


def proposals(result: SearchResult) -> tuple[Proposal, ...]:
    """The smallest change of each kind with which the question of `result`, now without a plan, has one."""
    problem = result.problem
    budget = Budget(max(SEARCHES * result.legal, FEWEST_ROWS))
    found: list[Proposal] = []
    found += pin_proposals(problem, budget)
    for kind in (optimizers, adapters):
        found += first_that_fits(kind(problem), budget)
    found += device_counts(problem, budget)
    for kind in (sequences, precisions, larger_devices):
        found += first_that_fits(kind(problem), budget)
    return tuple(found)
