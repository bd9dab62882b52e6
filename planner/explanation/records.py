"""An explanation as a record for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from planner.explanation.comparison import Comparison
from planner.explanation.explanation import Explanation
from planner.explanation.outcome import Verdict
from planner.objective import METRICS, metric
from planner.plan import Plan


def as_json(found: Explanation, assumed: Sequence[str]) -> dict[str, Any]:
    """The answer of `planner explain --json`."""
    result, best = found.result, found.result.best
    return {
        "assumed": list(assumed),
        "considered": result.considered,
        "legal": result.legal,
        "feasible": result.feasible,
        "rejected": result.rejected,
        "objective": result.problem.objective,
        "ranked_by": METRICS[result.problem.objective],
        "best_figure": None if best is None else metric(result.problem.objective, best.estimate),
        "best": _plan(best),
        "closest": None if best else _plan(result.closest()[0]),
        "indistinguishable": found.indistinguishable,
        "prefer": result.problem.preference.prefer,
        "fastest_place": result.first_faster + 1 if result.feasible else None,
        "comparisons": [_comparison(comparison) for comparison in found.comparisons],
        "verdicts": [_verdict(verdict) for verdict in found.verdicts],
        "binding": None if found.binding is None else asdict(found.binding),
        "changes": [
            asdict(replace(change, plan=None)) | {"plan": _plan(change.plan)} for change in found.changes
        ],
        "neighbours": [
            asdict(replace(one, layout=None))
            | {"layout": None if one.layout is None else one.layout.model_dump(mode="json")}
            for one in found.neighbours
        ],
        "advice": found.advice,
        "proposals": [one.as_json() for one in found.proposals],
    }


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    return (
        None
        if plan is None
        else plan.model_dump(mode="json", include={"layout", "estimate", "fits", "reason"})
    )


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "asked": verdict.degrees,
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "rules": verdict.rules,
        "legal": verdict.legal,
        "feasible": verdict.feasible,
        "plan": _plan(verdict.plan),
        "place": verdict.place,
        "not_searched": verdict.not_searched,
        "comparison": None if verdict.comparison is None else _comparison(verdict.comparison),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "against": comparison.second.layout.model_dump(mode="json"),
        "throughput": comparison.throughput,
        "told_apart": comparison.distinguishable,
        "time_s": [asdict(term) for term in comparison.time],
        "memory_bytes": [asdict(term) for term in comparison.memory],
    }
