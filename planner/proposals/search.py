"""The proposals for a question where nothing fits, in the order in which an engineer would try them.

Savings of bytes come first: removal of pins of recomputation, ZeRO or offload, and an optimizer of fewer
bytes. Then adapters instead of the full model, more devices, shorter sequences, a number format of fewer
bits, and devices with more memory. A change is first tested on the layouts that need the least memory. If one
of them fits, the changed question is searched as a whole, so the price is that of its own best plan.
"""

from __future__ import annotations

from planner.proposals.devices import device_counts, larger_devices
from planner.proposals.fits import Budget, first_that_fits
from planner.proposals.pins import pin_proposals
from planner.proposals.proposal import Proposal
from planner.proposals.training import adapters, optimizers, precisions, sequences
from planner.ranking.result import SearchResult

SEARCHES = 5
"""Legal layouts that all proposals may examine, as a multiple of those of the question."""

FEWEST_ROWS = 200_000
"""Least number of legal layouts that are examined for all proposals; it takes a few seconds."""


def proposals(result: SearchResult) -> tuple[Proposal, ...]:
    """The smallest change of each kind that gives the question of `result`, now without a plan, a plan that
    fits."""
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
