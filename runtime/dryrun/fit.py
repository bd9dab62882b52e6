"""A trace of a rank beside the plan that it is of: whether the plan fits, and how near its estimate is."""

from __future__ import annotations

from planner.plan import Plan
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace

TOTAL = "bytes"
"""What the sum of all categories is called."""


def workspace_bytes(plan: Plan) -> float:
    """Bytes of the libraries' workspaces, which are no tensors of the step."""
    return plan.engine.for_device(plan.cluster.device).allocator.workspace_bytes


def needed_bytes(plan: Plan, trace: MemoryTrace) -> float:
    """Bytes that a device must have: the traced tensors, and what the plan adds for all that is none."""
    return trace.peak.total + workspace_bytes(plan) + plan.estimate.memory[trace.pipeline_rank].overhead


def fits(plan: Plan, trace: MemoryTrace) -> bool:
    """Whether a device of the plan has these bytes."""
    return needed_bytes(plan, trace) <= plan.cluster.memory_bytes


def estimated_bytes(plan: Plan, trace: MemoryTrace) -> dict[str, float]:
    """Bytes that the plan estimates for the traced tensors, by category and in all (`TOTAL`)."""
    memory = plan.estimate.memory[trace.pipeline_rank]
    parts = {name: float(getattr(memory, name)) for name in CATEGORIES}
    parts["temporaries"] = max(0.0, parts["temporaries"] - workspace_bytes(plan))
    return {TOTAL: sum(parts.values()), **parts}
