"""The plans that a job may start with on this machine: searched for, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels import Device
from costmodels.catalogue.local_machine import available_cores
from costmodels.errors import InputError
from planner.inputs.device import is_cpu, measured_notes
from planner.options.cluster import ClusterOptions
from planner.options.parallel import check_alone
from planner.options.search import idle_links
from planner.plan import Plan
from planner.ranking.distinct import distinct_plans
from runtime.job.continuation import PreviousRun, plan_for_ranks
from runtime.job.job import Job
from runtime.job.plan_search import search_for_job
from runtime.launch.configurations import ConfiguredJob, configured_job
from runtime.launch.launch_options import LaunchOptions
from runtime.launch.restarts import usable_ranks
from runtime.launch.warm_ranks import CAN_FORK, WarmRanks

MOST_CPU_RANKS = 8
"""Most ranks by default on a machine without GPUs, if it has that many cores."""


@dataclass(frozen=True)
class LocalPlans:
    """Plans for the devices of this machine."""

    plans: list[Plan]
    """The plans, the best first."""
    assumptions: list[str]
    """Assumptions made for values that no flag gives."""


def local_plans(job: Job, previous: PreviousRun | None, count: int, warm: WarmRanks | None) -> LocalPlans:
    """The best `count` plans of a job, or the one that its flags name.

    Args:
        previous: the run that the job continues.
        warm: prepares for forked CPU ranks, if the ranks run on a CPU.

    Raises:
        InputError: this machine lacks the devices that flags or the plan need.
        NoLayoutFits: nothing fits into its memory.
    """
    if job.run.plan is not None:
        check_alone(job.model, job.batch, job.parallel, replace(job.cluster, world_size=None))
        plan = _plan_of_file(job.run.plan, job, previous)
        if warm is not None and forks_ranks(plan):
            warm.prepare(plan.layout.world_size)
        return LocalPlans([plan], [])
    return _searched(job, previous, count, warm)


def local_configuration(job: Job, options: LaunchOptions, warm: WarmRanks | None) -> ConfiguredJob:
    """The job of files of other software (`--config`), for this machine's devices or scaled down.

    Args:
        warm: prepares for forked CPU ranks, if the ranks run on a CPU.

    Raises:
        InputError: the files have no job that these devices run.
    """
    cluster = job.cluster
    if options.scale_down is not None:
        cluster = replace(cluster, world_size=options.scale_down)
    ranks, device = devices_of_machine(cluster, None)
    if not isinstance(device, str) and device.kind == "cpu":
        device = "cpu"
    found = configured_job(job, options, ranks, device)
    if warm is not None and forks_ranks(found.plan):
        warm.prepare(found.plan.layout.world_size)
    return found


def forks_ranks(plan: Plan) -> bool:
    """Return whether the ranks of a plan are forked from one process instead of started by torchrun."""
    return CAN_FORK and plan.cluster.device.kind == "cpu"


def _searched(job: Job, previous: PreviousRun | None, count: int, warm: WarmRanks | None) -> LocalPlans:
    cluster = job.cluster
    ranks, device = devices_of_machine(cluster, warm)
    result = search_for_job(job, device, ranks, ranks, previous)
    idle = idle_links(cluster, result.problem.cluster)
    measured = measured_notes(result.problem.cluster.device)
    rows = distinct_plans(result, count)
    notes = [*job.model.notes(), *job.parallel.notes(), *idle, *measured]
    return LocalPlans([row.plan for row in rows], notes)


def devices_of_machine(cluster: ClusterOptions, warm: WarmRanks | None) -> tuple[int, Device | str]:
    """The number of ranks to start on this machine, and their device."""
    gpus = 0
    on_cpu = is_cpu(cluster.device)
    if not on_cpu:
        from runtime.job.devices import (  # PyTorch, which a CPU needs not yet.
            detect_device,
            local_device_count,
        )

        gpus = local_device_count()
    if cluster.device is not None and not on_cpu and not gpus:
        raise InputError(f"--device {cluster.device}: this machine has no GPUs; leave it out or give cpu")
    if cluster.world_size is not None and cluster.world_size < 1:
        raise InputError(f"--world-size {cluster.world_size}: must be at least 1")
    ranks = cluster.world_size or gpus or min(MOST_CPU_RANKS, available_cores())
    if cluster.local_world_size not in (None, ranks):
        raise InputError(
            f"--local-world-size {cluster.local_world_size}: all {ranks} ranks start on this machine; "
            "leave it out"
        )
    if gpus and ranks > gpus:
        raise InputError(
            f"--world-size {ranks}: this machine has {gpus} GPUs; give at most that, or start torchrun on "
            "every node with -m runtime.pretrain"
        )
    device = cluster.device or detect_device(ranks)
    if warm is not None and CAN_FORK and not gpus:
        warm.prepare(ranks)
    return ranks, device


def _plan_of_file(path: str, job: Job, previous: PreviousRun | None) -> Plan:
    """The plan of the file; a continued job with another number of ranks is planned anew."""
    plan, world_size = Plan.load(path), job.cluster.world_size
    if previous is not None:
        ranks = world_size or usable_ranks(plan)
        if ranks != plan.layout.world_size:
            return plan_for_ranks(plan, ranks, ranks, job.training, job.data)
    if world_size not in (None, plan.layout.world_size):
        raise InputError(
            f"--world-size {world_size}: the plan {path} is for world size {plan.layout.world_size}; "
            "leave it out or plan again"
        )
    if plan.cluster.device.kind == "cpu":
        return plan
    from runtime.job.devices import local_device_count

    if plan.layout.world_size > local_device_count():
        raise InputError(
            f"the plan {path} is for {plan.layout.world_size} x {plan.cluster.device.name}, but this machine "
            f"has {local_device_count()} GPUs; plan for this machine, or start torchrun on every node"
        )
    return plan
