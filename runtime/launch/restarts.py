"""Restarts of a job after a failure, from its last checkpoint and with the remaining devices."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from planner.plan import Plan
from runtime import entry
from runtime.job.job import Job, RunOptions
from runtime.job.resumption import continuation
from runtime.launch.supervisor import Outcome, run_job
from runtime.launch.torchrun import torchrun_command
from runtime.launch.warm_ranks import WarmRanks


class Display(Protocol):
    """A display of the lines and metrics of a job."""

    def line(self, text: str) -> None:
        """Show a line of the job."""

    def metrics(self, record: dict[str, Any]) -> None:
        """Show a record of its metrics."""


def usable_ranks(plan: Plan) -> int:
    """Ranks of `plan` that this machine has devices for."""
    wanted = plan.layout.world_size
    if plan.cluster.device.kind == "cpu":
        return wanted
    # In a process of its own: this one counts once, and a device may have been lost since.
    counted = subprocess.run(entry.command("runtime.job.devices"), capture_output=True, text=True)
    text = counted.stdout.strip()
    return min(wanted, int(text)) if text.isdigit() and int(text) else wanted


def rank_arguments(job: Job) -> list[str]:
    """Arguments of `runtime.pretrain` for a job whose number of ranks comes from torchrun."""
    cluster = replace(job.cluster, world_size=None, local_world_size=None)
    run = RunOptions(job.run.plan, job.run.distributed_timeout_minutes)
    return replace(job, cluster=cluster, run=run).arguments()


def run_with_restarts(
    plan: Plan, job: Job, restarts: int, display: Display, warm: WarmRanks | None = None
) -> Outcome:
    """Run a job to its end, with restarts from its last checkpoint after failures that may be temporary.
    torchrun's own restarts are not used, as they repeat input errors, and always use the same number of
    ranks.

    Args:
        plan: the plan in the file `job.run.plan`.
        restarts: most restarts.
        warm: forks the ranks, if they are on a CPU.
    """
    assert job.output.log_dir is not None
    ranks, folder, saves = plan.layout.world_size, Path(job.output.log_dir), job.output.save is not None
    for done in range(restarts + 1):
        command = torchrun_command(ranks, rank_arguments(job))
        shown = display.line, display.metrics
        outcome = run_job(command, ranks, folder, *shown, restarts=done, saves=saves, warm=warm)
        if not outcome.restart or done == restarts:
            break
        job = continuation(job)
        ranks = usable_ranks(plan)
        display.line(f"planner: {outcome.message}; restart {done + 1} of {restarts} with {ranks} ranks")
    return outcome
