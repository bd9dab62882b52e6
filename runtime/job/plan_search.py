"""A search for the plans of a job on the present devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodels import Device
from costmodels.errors import InputError
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.trained_here import check_model
from runtime.job.continuation import PreviousRun, keep_batch, keep_micro_batch
from runtime.job.job import Job
from runtime.settings.job_rules import job_rules, reachable_batch

if TYPE_CHECKING:
    from planner.ranking.result import SearchResult


def search_for_job(
    job: Job,
    device: Device | str,
    world_size: int,
    local_world_size: int,
    previous: PreviousRun | None = None,
) -> SearchResult:
    """The plans that the runtime can train on `world_size` devices, in order.

    Args:
        previous: the run that the job continues; its global batch is kept.

    Raises:
        InputError: the job names another engine than this runtime.
        NoLayoutFits: there is no such plan.
    """
    if job.parallel.engine not in (None, DEFAULT_ENGINE):
        raise InputError(
            f"--engine {job.parallel.engine}: what trains here is {DEFAULT_ENGINE}; leave the flag out, or "
            "price other engines with `planner suggest`"
        )
    from planner import advice  # Ranks with a plan, nearly all of them, never search.
    from planner.api import search
    from planner.options.search import search_keywords

    spec = job.model.spec()
    check_model(spec)
    batch = reachable_batch(keep_batch(job.batch, previous), job.training)
    parallel = keep_micro_batch(job.parallel, job.training, previous)
    keywords = search_keywords(spec, job.cluster, batch, parallel, job_rules(job.training, job.data))
    keywords["device"], keywords["local_world_size"] = device, local_world_size
    result = search(spec, world_size=world_size, **keywords)
    if result.best is None:
        raise advice.no_layout_fits(result)
    return result
