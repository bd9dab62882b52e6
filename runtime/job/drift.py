"""The part of a step whose prediction is most likely wrong, and advice about it."""

from __future__ import annotations

from costmodels.spec.layout import Layout
from costmodels.spec.record import in_seconds
from planner.history.step_parts import TERMS, StepParts, predicted_parts
from planner.plan import Plan

UNCALIBRATED = {
    "products": "`planner calibrate` times them on this device",
    "attention": "`planner calibrate` times it on this device",
    "elementwise": "`planner calibrate` times the device's memory",
    "optimizer": "`planner calibrate` times it on this device",
    "host_gaps": "`planner calibrate` times the host; larger microbatches give the device more to do",
    "communication": "`planner calibrate` on all ranks, or --preflight measure, times the links",
}
"""Advice for a device with the catalogue's values."""

CALIBRATED = {
    "products": "the device is slower than when it was calibrated: busy, shared or throttled",
    "attention": "the device is slower than when it was calibrated, or sequences are of other lengths",
    "elementwise": "other processes use the device's memory; `planner calibrate --from-history` learns this",
    "optimizer": "other processes use the device's memory; `planner calibrate --from-history` learns this",
    "host_gaps": "the host's cores are busy or too few; larger microbatches give the device more to do",
    "communication": "look for a slow rank (--straggler-factor) or other jobs on these links",
}
"""Advice for a device that was measured on this machine earlier and is slower now."""

FASTER = "`planner calibrate --from-history` learns from this run"


def likely_wrong(plan: Plan, parts: StepParts, slower: bool) -> str:
    """A sentence on the term with the largest error in the direction of the whole step's error."""
    predicted, measured = predicted_parts(plan.estimate.time), parts.by_term()
    sign = 1 if slower else -1
    term = max(TERMS, key=lambda name: sign * (measured[name] - predicted[name]))
    what = _communication(plan.layout, parts) if term == "communication" else TERMS[term]
    seconds = f"{in_seconds(measured[term])} of a step, predicted {in_seconds(predicted[term])}"
    told = CALIBRATED if plan.cluster.device.constants else UNCALIBRATED
    advice = told[term] if slower else FASTER
    return f"most of it is {what}: {seconds}; {advice}"


def _communication(layout: Layout, parts: StepParts) -> str:
    """A text on the communication of a layout: the longest collective, and the kinds of parallelism that use
    it."""
    if not parts.collectives:
        return TERMS["communication"]
    kind = max(parts.collectives, key=parts.collectives.__getitem__)
    axes = [
        name
        for name, size, kinds in (
            ("tensor", layout.tensor_parallel, ("all_reduce", "all_gather", "reduce_scatter")),
            (
                "context",
                layout.context_parallel,
                ("all_gather", "reduce_scatter", "all_to_all", "send_receive"),
            ),
            ("expert", layout.expert_parallel, ("all_to_all",)),
            ("pipeline", layout.pipeline_parallel, ("send_receive",)),
            ("data", layout.data_parallel, ("all_reduce", "all_gather", "reduce_scatter")),
        )
        if size > 1 and kind in kinds
    ]
    whose = f" of {' or '.join(axes)} parallelism" if axes else ""
    return f"communication, above all {kind.replace('_', '-')}{whose}"
