"""The gain of each single change of a job, found by a search of its own, and the bottleneck that follows from
the gains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import Cluster
from costmodels.spec.record import GIB
from planner import advice
from planner.explanation.neighbours import Neighbour
from planner.inputs.batch import Batch
from planner.inputs.pin_notation import pins_without_one
from planner.objective import gain, metric
from planner.plan import Plan
from planner.problem import Problem
from planner.processes import Calls, helpers_for
from planner.proposals.devices import with_world_size
from planner.ranking.ranking import rank
from planner.ranking.reasons import gain_text
from planner.ranking.result import Listed, SearchResult

Kind = Literal["memory", "inter_node", "intra_node", "batch", "devices", "pin"]

Constraint = Literal["memory", "batch", "network", "pin", "rule", "compute"]

CONSTRAINTS: dict[Kind, Constraint] = {
    "memory": "memory",
    "inter_node": "network",
    "intra_node": "network",
    "batch": "batch",
    "pin": "pin",
}
"""The constraint that each kind of change relieves."""

SAME_LAYOUTS: tuple[Kind, ...] = ("memory", "intra_node", "inter_node")
"""Changes that keep the set of legal layouts and their bytes."""

NOTICEABLE = 1.01
"""The least factor by which a change must improve the objective to be reported."""

TIMES = 2
"""The factor by which a change increases its resource."""


@dataclass(frozen=True)
class Change:
    """One change, and the best plan after the change."""

    kind: Kind
    what: str
    """The change in words."""
    ratio: float | None
    """Tokens per second of the fastest plan after the change over those of the fastest plan before; None
    where nothing is legal or fits after the change."""
    figure: float | None
    """The metric of the fastest plan after the change, by `objective.METRICS`; None where `ratio` is None."""
    plan: Plan | None
    """The first plan after the change: the preferred one of the plans that tie with the fastest."""
    why_not: str
    """The reason why there is no plan; empty where there is one."""


@dataclass(frozen=True)
class Binding:
    """The bottleneck of the best plan."""

    constraint: Constraint
    reason: str


def changes(result: SearchResult) -> Calls[Change]:
    """The first plans with twice the memory, links, batch and devices, and without each pin, if any fits.

    Each is a separate search that takes as long as the first; helpers start with them at once. The named plan
    is the answer to the changed question. The gain compares the fastest plans before and after the change, as
    the simplest of tied plans does not show the effect of a change.
    """
    problem, fastest = result.problem, result.fastest
    if fastest is None:
        return Calls([], 0)
    before = fastest.estimate.tokens_per_s
    listed = None if result.offloads or problem.cluster.parts else result.listed
    calls = [
        partial(_searched, kind, what, changed, before, listed if kind in SAME_LAYOUTS else None)
        for kind, what, changed in changed_problems(problem)
    ]
    return Calls(calls, helpers_for(len(calls), result.elapsed_s))


def _searched(kind: Kind, what: str, problem: Problem, tokens_per_s: float, known: Listed | None) -> Change:
    """The first plan of a changed problem, and its fastest plan against `tokens_per_s` of the fastest one
    before.

    `known` are the layouts of the search before, if the change keeps them.
    """
    try:
        space = problem.space() if known is None else known.space
    except InputError as error:
        return Change(kind, what, None, None, None, str(error))
    if not len(space.table):
        return Change(kind, what, None, None, None, str(advice.no_legal_layout(problem)))
    after = rank(problem, space, time.perf_counter(), offload=True, known=known)
    if not after.feasible:
        return Change(kind, what, None, None, None, "nothing fits")
    fastest = after.plan(after.first_faster).estimate
    ratio = fastest.tokens_per_s / tokens_per_s
    return Change(kind, what, ratio, metric(problem.objective, fastest), after.plan(0), "")


def changed_problems(problem: Problem) -> Iterator[tuple[Kind, str, Problem]]:
    """The kind of each change, the change in words, and the changed problem."""
    cluster, batch = problem.cluster, problem.batch
    larger_memory = _with_more_memory(cluster)
    before, after = (_memory_text(each) for each in (cluster, larger_memory))
    what = f"{after} GiB a device instead of {before}"
    yield "memory", what, replace(problem, cluster=larger_memory)
    if cluster.world_size > 1:
        fast = cluster.fast_link
        yield (
            "intra_node",
            f"{TIMES} x {fast.name} inside nodes",
            replace(problem, cluster=_faster(cluster, intra=True)),
        )
    if cluster.nodes > 1 and cluster.world_size > cluster.joined:
        slow = cluster.slow_link
        yield (
            "inter_node",
            f"{TIMES} x {slow.name} between nodes",
            replace(problem, cluster=_faster(cluster, intra=False)),
        )
    larger = Batch(batch.size * TIMES, batch.maximum)
    most = "at most " * batch.maximum
    what = f"a global batch of {most}{larger.size} instead of {batch.size}"
    yield "batch", what, replace(problem, batch=larger)
    world = cluster.world_size * TIMES
    if cluster.device.kind != "cpu":
        yield (
            "devices",
            f"{world} devices instead of {cluster.world_size}",
            with_world_size(problem, world),
        )
    for without, others in pins_without_one(problem.pins):
        yield "pin", without, replace(problem, pins=others)


def _with_more_memory(cluster: Cluster) -> Cluster:
    """The cluster with `TIMES` the memory on each device, on nodes of two kinds on both."""
    parts = tuple(_with_more_memory(part) for part in cluster.parts)
    return cluster.model_copy(update={"memory_bytes": cluster.memory_bytes * TIMES, "parts": parts})


def _memory_text(cluster: Cluster) -> str:
    """A text with the GiB of a device, or of each kind of device."""
    every = dict.fromkeys(f"{part.memory_bytes / GIB:.0f}" for part in cluster.parts or (cluster,))
    return " and ".join(every)


def _faster(cluster: Cluster, intra: bool) -> Cluster:
    """The cluster with links of one kind `TIMES` as fast, measured links included."""
    name = "intra_node" if intra else "inter_node"
    link = cluster.fast_link if intra else cluster.inter_node or cluster.device.inter_node
    measured = tuple(
        one.model_copy(update={"bus_bandwidth": one.bus_bandwidth * TIMES})
        if (one.nodes == 1) == intra
        else one
        for one in cluster.measured
    )
    given = cluster.model_copy(update={name: link, "measured": measured})
    bandwidth = link.bandwidth * TIMES
    if not intra:
        # The bandwidth of a given link is that of a card or of a device's share, unlike that of the device's
        # own link.
        bandwidth *= cluster.slow_link.bandwidth / given.slow_link.bandwidth
    return given.model_copy(update={name: link.model_copy(update={"bandwidth": bandwidth})})


def binding(result: SearchResult, found: list[Change], near: list[Neighbour]) -> Binding | None:
    """The bottleneck of the best plan: the largest gain that `changes` and `neighbours` found.

    More devices do not count, as the question is about the speed of a device. None where nothing fits, and
    where the objective is to need little memory.
    """
    if result.best is None or result.problem.objective == "memory":
        return None
    objective = result.problem.objective
    before = metric(objective, result.plan(result.first_faster).estimate)
    worth = [
        (
            gain(objective, change.figure, before),
            CONSTRAINTS[change.kind],
            f"{change.what}{', the job would have' if change.kind == 'pin' else ' would give'} "
            f"{gain_text(objective, change.figure, before)}",
        )
        for change in found
        if change.kind in CONSTRAINTS and change.figure is not None
    ]
    worth += [
        (
            gain(objective, one.figure, before),
            "rule",
            f"{one.rule}; without this rule {one.change} would give "
            f"{gain_text(objective, one.figure, before)}",
        )
        for one in near
        if one.were_it_legal is not None and one.figure is not None
    ]
    ratio, constraint, reason = max(worth, default=(0.0, "compute", ""))
    if ratio >= NOTICEABLE:
        return Binding(constraint, reason)
    parts = result.best.estimate.time
    share = (parts.compute + parts.attention + parts.elementwise) / parts.total
    return Binding(
        "compute",
        f"{100 * share:.0f} % of the step computes, and no change of memory, batch, links or pins gains "
        f"{100 * (NOTICEABLE - 1):.0f} %",
    )
