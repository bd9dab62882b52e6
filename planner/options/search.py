"""The arguments of a search, as flags give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from planner.inputs.engine import DEFAULT_ENGINE
from planner.options.batch import BatchOptions
from planner.options.cluster import HardwareOptions
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from planner.problem import Problem, SearchKeywords
from planner.space.rule import Rule


def search_keywords(
    model: ModelSpec,
    cluster: HardwareOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    rules: Sequence[Rule] = (),
) -> SearchKeywords:
    """Keyword arguments of `planner.search`, `explain` and `sizes`, all but the model and the world size.

    `rules` follow from flags of training; they hold for this package's runtime only.
    """
    here = parallel.engine in (None, DEFAULT_ENGINE)
    job: SearchKeywords = {
        "rules": tuple(rules) if here else (),
        "local_world_size": cluster.local_world_size,
        "device": cluster.device,
        "global_batch_size": batch.global_batch_size,
        "max_global_batch_size": batch.max_global_batch_size,
        "objective": batch.objective,
        "prefer": batch.prefer,
        "headroom": batch.headroom,
        "engine": parallel.engine,
        "pin": parallel.pins(model),
        "memory_margin_gib": cluster.memory_margin_gib,
    }
    return cast(SearchKeywords, {**job, **cluster.network()})


BETWEEN_NODES = ("inter_node_gbps", "nics_per_node", "nodes_per_pod", "oversubscription")
"""Flags about the network that joins nodes."""


def idle_links(options: HardwareOptions, cluster: Cluster) -> list[str]:
    """Notes on flags about a network that a job of one node does not use."""
    given = [f"--{name.replace('_', '-')}" for name in BETWEEN_NODES if getattr(options, name) is not None]
    if not given or cluster.nodes > 1:
        return []
    verb = "has" if len(given) == 1 else "have"
    return [f"{', '.join(given)} {verb} no effect: the job's {cluster.world_size} devices are in one node"]


def announced_devices(cluster: Cluster) -> list[str]:
    """Notes on figures of devices that are announced and not measured."""
    devices = [part.device for part in cluster.parts or (cluster,)]
    return [f"{one.name} is announced: its figures are its maker's" for one in devices if one.announced]


def assumed_loads(plan: Plan | None) -> list[str]:
    """A note on the load of experts that a plan's price assumes; none where the load is given."""
    text = plan.load_assumed if plan is not None else ""
    return [f"{text} (--moe-load-imbalance 1 for forced balance)"] if text else []


def assumed_engine(parallel: ParallelOptions, problem: Problem) -> list[str]:
    """Notes on an engine that no flag names, or that has not run on such devices."""
    device, engine = problem.cluster.device, problem.engine
    if device.kind in engine.runs.priced_devices:
        return [f"engine {engine.name} does not run on {device.name}: priced as if it did, to compare"]
    if device.kind in engine.runs.untried_devices:
        return [f"engine {engine.name} should run on {device.name}, and nobody has tried it there"]
    if parallel.engine is not None or engine.name == DEFAULT_ENGINE:
        return []
    return [f"no engine given: {engine.name}, as the runtime of this package has not run on {device.name}"]
