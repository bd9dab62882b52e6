"""Comparison of a rank's trace with its plan: a test if the plan fits, and the error of the estimate."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from costmodels.spec.record import GIB
from planner.plan import Plan
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace

TOTAL = "bytes"
"""The name of the sum of all categories."""

NEEDS_PROOF = 0.8
"""Share of a device's memory; a job whose memory range exceeds it is traced before its ranks start."""


@dataclass(frozen=True)
class Proof:
    """The dry runs of all pipeline ranks of a plan."""

    plan: Plan
    traces: tuple[MemoryTrace, ...]

    @property
    def fullest(self) -> MemoryTrace:
        """The trace of the rank that needs the most memory."""
        return max(self.traces, key=lambda trace: needed_bytes(self.plan, trace))

    @property
    def needed_bytes(self) -> float:
        """Bytes that a device needs."""
        return needed_bytes(self.plan, self.fullest)

    @property
    def fits(self) -> bool:
        """True if all ranks fit into their devices."""
        return fits(self.plan, self.fullest)

    def describe(self) -> str:
        """A text with the bytes of the fullest rank and of its device."""
        have = self.plan.cluster.memory_bytes / GIB
        where = f"pipeline rank {self.fullest.pipeline_rank}" if len(self.traces) > 1 else "a rank"
        return f"{where} takes {self.needed_bytes / GIB:.2f} of {have:.2f} GiB by its dry run"

    def proven_plan(self) -> Plan:
        """The plan with traced bytes instead of estimated ones."""
        memory = list(self.plan.estimate.memory)
        for trace in self.traces:
            traced = {name: float(size) for name, size in trace.peak.allocated.items()}
            traced["temporaries"] += workspace_bytes(self.plan)
            traced["doubt"] = 0.0
            memory[trace.pipeline_rank] = memory[trace.pipeline_rank].model_copy(update=traced)
        peak = max(stage.total for stage in memory)
        estimate = self.plan.estimate.model_copy(
            update={
                "memory": tuple(memory),
                "peak_memory_bytes": peak,
                "peak_memory_low_bytes": peak,
                "peak_memory_high_bytes": 0.0,
            }
        )
        return self.plan.model_copy(update={"estimate": estimate})


def needs_proof(plan: Plan) -> bool:
    """Return whether the upper end of a plan's memory range is close to a device's memory."""
    return plan.estimate.peak_memory_bytes > NEEDS_PROOF * plan.cluster.memory_bytes


def workspace_bytes(plan: Plan) -> float:
    """Bytes of library workspaces, which are not tensors of the step."""
    return plan.engine.for_device(plan.cluster.device).allocator.workspace_bytes


def needed_bytes(plan: Plan, trace: MemoryTrace) -> float:
    """Bytes that a device needs: the traced tensors, and the plan's bytes besides tensors."""
    return trace.peak.total + workspace_bytes(plan) + plan.estimate.memory[trace.pipeline_rank].overhead


def fits(plan: Plan, trace: MemoryTrace) -> bool:
    """Return whether a device of the plan has the bytes that a traced rank needs."""
    return needed_bytes(plan, trace) <= plan.cluster.memory_bytes


def estimated_bytes(plan: Plan, trace: MemoryTrace) -> dict[str, float]:
    """Estimated bytes for the traced tensors, by category and in total (`TOTAL`)."""
    memory = plan.estimate.memory[trace.pipeline_rank]
    parts = {name: float(getattr(memory, name)) for name in CATEGORIES}
    parts["temporaries"] = max(0.0, parts["temporaries"] - workspace_bytes(plan))
    return {TOTAL: sum(parts.values()), **parts}
