"""Nodes of two kinds: the better order of the two kinds, and a comparison with one kind alone."""

from __future__ import annotations

import time
from dataclasses import replace

from costmodels.errors import InputError
from costmodels.spec.hardware import Cluster
from costmodels.spec.mixed_cluster import mixed_cluster
from planner.objective import EQUAL, gain, metric
from planner.problem import Problem
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult
from planner.space.grid import Space


def rank_orders(problem: Problem, space: Space, started: float) -> SearchResult:
    """Rank with each kind in front, and return the better of the two results.

    The kind in front runs the first stages, which hold most microbatches and the embedding; the other runs
    the head.
    """
    found = [
        rank(replace(problem, cluster=cluster), space, started, offload=True)
        for cluster in _orders(problem.cluster)
    ]
    best = max(found, key=_score)
    return replace(best, elapsed_s=time.perf_counter() - started, notes=_notes(best))


def _orders(cluster: Cluster) -> list[Cluster]:
    first, second = cluster.parts
    if first.device == second.device:
        return [cluster]
    return [cluster, mixed_cluster(second, first)]


def _score(result: SearchResult) -> tuple[bool, float]:
    """A score of a search, larger for the better one; equal searches keep the order of kinds that was asked
    for."""
    if result.best is None:
        return False, -result.closest()[0].estimate.peak_memory_bytes
    objective = result.problem.objective
    own = metric(objective, result.best.estimate)
    return True, own if objective == "throughput" else -own


def _notes(result: SearchResult) -> tuple[str, ...]:
    """Notes on the ranks of each kind of node, and on the speed of one kind alone."""
    first, second = result.problem.cluster.parts
    border, last = first.world_size, result.problem.cluster.world_size - 1
    order = (
        f"start the nodes in this order: ranks 0 to {border - 1} on {first.device.name}, "
        f"{border} to {last} on {second.device.name}"
    )
    alone = _alone(result)
    return (order,) if alone is None else (order, alone)


def _alone(result: SearchResult) -> str | None:
    """A text on the speed of the better kind alone; None where nothing fits on either kind, or on both
    together."""
    if result.best is None or result.problem.objective == "memory":
        return None
    objective, before = result.problem.objective, metric(result.problem.objective, result.best.estimate)
    found = []
    first, second = result.problem.cluster.parts
    for part, other in ((first, second), (second, first)):
        problem = replace(result.problem, cluster=part)
        try:
            space = problem.space()
        except InputError:
            continue  # Pins that do not divide its devices.
        alone = rank(problem, space, 0.0, offload=True).best if len(space.table) else None
        if alone is not None:
            ratio = gain(objective, metric(objective, alone.estimate), before)
            found.append((ratio, f"{part.world_size} x {part.device.name}", other.device.name))
    if not found:
        return None
    ratio, devices, without = max(found)
    gains = {"step-time": "as fast a step", "cost": "the tokens per device-hour"}
    what = gains.get(objective, "the tokens/s")
    if ratio > 1 + EQUAL:
        return f"leave the {without} nodes out: {devices} alone have {ratio:.2f} x {what}"
    return f"{devices} alone would have {ratio:.2f} x {what}"
