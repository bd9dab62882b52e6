"""Proof that a plan fits into memory: the dry run of its training step, before any rank starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cli.status import Status
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from planner.plan import Plan
from runtime.dryrun.fit import Proof, needs_proof
from runtime.dryrun.memory_trace import MemoryTrace
from runtime.dryrun.ranks import trace_ranks
from runtime.dryrun.requirements import check_installed, ranks_to_trace
from runtime.settings.training_options import TrainingOptions

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

MOST_TRIED = 8
"""Most plans that are traced until one fits."""


def traces_of(
    plan: Plan,
    training: TrainingOptions,
    ranks: Sequence[int],
    status: Status,
    early: BaseContext | None = None,
) -> list[MemoryTrace]:
    """The dry runs of ranks of a plan.

    Args:
        early: a context of processes with PyTorch (`runtime.dryrun.ranks.early_tracer`).
    """
    on_gpu = plan.cluster.device.kind != "cpu"
    return trace_ranks(
        plan.model,
        plan.layout,
        ranks,
        compiled=training.compiles(plan.layout, on_gpu),
        device="cuda" if on_gpu else "cpu",
        options=training,
        tell=status.tell,
        early=early,
    )


def proof_of(plan: Plan, training: TrainingOptions, status: Status) -> Proof:
    """The dry runs of all pipeline ranks of a plan."""
    check_installed(plan.layout)
    ranks = ranks_to_trace(plan.layout, None, None)
    return Proof(plan, tuple(traces_of(plan, training, ranks, status)))


def proven_plan(
    plans: Sequence[Plan],
    more: Callable[[int], Sequence[Plan]],
    wanted: bool | None,
    training: TrainingOptions,
    status: Status,
) -> Plan:
    """The first of `plans` that fits by its dry run, with the traced bytes for the estimated ones.

    Args:
        more: gives that number of plans, with the given ones first; asked where the given ones do not fit.
        wanted: whether plans are traced; None lets it depend on the share of a device's memory that they
            need.

    Raises:
        InputError: no plan fits.
    """
    refused: list[Proof] = []
    while len(refused) < len(plans):
        plan = plans[len(refused)]
        if not (needs_proof(plan) if wanted is None else wanted):
            return plan
        proof = proof_of(plan, training, status)
        if proof.fits:
            return proof.proven_plan()
        refused.append(proof)
        if len(refused) == len(plans) < MOST_TRIED:
            plans = more(MOST_TRIED)
        if len(refused) < len(plans):
            status.clear()
            print(f"planner: {_refusal(proof)}; takes the next plan", file=sys.stderr)
    what = _refusal(refused[0])
    if len(refused) > 1:
        limit = plans[0].cluster.memory_bytes / GIB
        what = f"none of the first {len(refused)} plans fits into {limit:.2f} GiB by its dry run"
    raise InputError(f"{what}; plan again with a --memory-margin-gib, or start it as it is with --no-dry-run")


def _refusal(proof: Proof) -> str:
    return f"{proof.plan.layout.describe()} does not fit: {proof.describe()}"
