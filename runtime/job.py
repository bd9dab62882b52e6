"""A job as its flags describe it, and the plan that it makes for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodels import Device
from costmodels.errors import InputError
from planner import advice
from planner.flags import flag
from planner.inputs import DEFAULT_ENGINE, NetworkOptions
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions
from planner.plan import Plan
from planner.ranking import SearchResult
from planner.search import search
from runtime.data import Datasets
from runtime.options import DataOptions, OutputOptions, TrainingOptions
from runtime.preflight import check_model

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class RunOptions:
    """What to run, and how the ranks find each other."""

    plan: str | None = flag(None, "Plan file of `planner suggest --save`; without it rank 0 plans.")
    distributed_timeout_minutes: float = flag(10.0, "Minutes after which a stuck collective is an error.")


@dataclass(frozen=True)
class Job:
    """The flags of a run."""

    model: ModelOptions
    cluster: ClusterOptions
    batch: BatchOptions
    parallel: ParallelOptions
    training: TrainingOptions
    data: DataOptions
    output: OutputOptions
    run: RunOptions


def search_here(
    model: ModelOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    device: Device | str,
    world_size: int,
    local_world_size: int,
    *,
    memory_margin_gib: float | None = None,
    **network: Unpack[NetworkOptions],
) -> SearchResult:
    """The plans that the runtime can train on `world_size` devices, joined as `network` says, in order.

    `memory_margin_gib` and `network` are as in `planner.search`. Raises `NoLayoutFits` when there is none.
    """
    if parallel.engine != DEFAULT_ENGINE:
        raise InputError(
            f"--engine {parallel.engine}: what trains here is {DEFAULT_ENGINE}; leave the flag out, or price "
            "other engines with `planner suggest`"
        )
    spec = model.spec()
    check_model(spec)
    result = search(
        spec,
        world_size=world_size,
        local_world_size=local_world_size,
        device=device,
        global_batch_size=batch.global_batch_size,
        max_global_batch_size=batch.max_global_batch_size,
        objective=batch.objective,
        pin=parallel.pins(spec),
        memory_margin_gib=memory_margin_gib,
        **network,
    )
    if result.best is None:
        raise advice.no_layout_fits(result)
    return result


def plan_here(
    model: ModelOptions,
    batch: BatchOptions,
    parallel: ParallelOptions,
    device: Device | str,
    world_size: int,
    local_world_size: int,
    *,
    memory_margin_gib: float | None = None,
    **network: Unpack[NetworkOptions],
) -> Plan:
    """The first of the plans that `search_here` finds for the same arguments."""
    sizes = world_size, local_world_size
    margin = memory_margin_gib
    return search_here(model, batch, parallel, device, *sizes, memory_margin_gib=margin, **network).plan(0)


def sample_order(job: Job, datasets: Datasets) -> dict[str, Any]:
    """What the order of the training samples depends on; a checkpoint goes on with the same only."""
    return {
        "seed": job.training.seed,
        "split": job.data.split,
        "tokens": sum(int(indexed.tokens.size) for indexed in datasets.indexed),
    }
