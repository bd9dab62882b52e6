"""`planner launch` on one of several nodes: it starts the ranks of its node, and the first rank plans."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from cli.job_end import print_outcome
from cli.progress import Display
from cli.proof import proven_plan
from cli.status import Status
from costmodels.errors import InputError
from planner.plan import Plan
from runtime.job.job import Job
from runtime.launch.launch_options import LaunchOptions, TrialOptions
from runtime.launch.nodes import Nodes, node_command, node_environment, ranks_of_node
from runtime.launch.preparation import make_log_dir
from runtime.launch.restarts import rank_arguments
from runtime.launch.supervisor import JobStopped, Outcome, run_job
from runtime.launch.torchrun import shell_line


def launch_node(job: Job, options: LaunchOptions, trial: TrialOptions, nodes: Nodes) -> Outcome | None:
    """Start the ranks of this node and wait for their end; returns None after --print-command, which starts
    no ranks."""
    if trial.plans_to_try is not None:
        raise InputError(
            f"--try {trial.plans_to_try}: plans are tried on one machine; leave it out on several"
        )
    if nodes.is_elastic and job.output.save is None:
        raise InputError(f"{nodes.source}: nodes that come and go need --save FOLDER, from which all go on")
    plan = None if job.run.plan is None else Plan.load(job.run.plan)
    if plan is None and options.dry_run:
        raise InputError(
            "--dry-run on several nodes needs --plan: without it the first rank plans when all have started; "
            "save one with planner suggest --save plan.json"
        )
    ranks = ranks_of_node(nodes, job, None if plan is None else plan.layout.world_size)
    path = log_dir_of_node(job, plan, nodes)
    described = job.with_log_dir(path)
    restarts = options.max_restarts
    command = node_command(nodes, ranks, rank_arguments(described), restarts, options.rdzv_conf)
    if options.print_command:
        print(shell_line(command))
        return None
    if plan is not None:
        with Status() as status:
            # Every node traces the same plan to the same end, so that none waits for one that refuses.
            only = [plan]
            proven_plan(only, lambda _: only, options.traces_memory, job.training, status)
    log_dir = make_log_dir(path, is_new=job.output.log_dir is None)
    if log_dir != path:
        command = node_command(
            nodes, ranks, rank_arguments(job.with_log_dir(log_dir)), restarts, options.rdzv_conf
        )
    with Status() as status:
        status.line(f"{ranks} ranks on {nodes.describe()}; output is in {log_dir}")
        status.tell(f"starting {ranks} ranks")
        display = Display(status, job.training.train_iters)
        saves = job.output.save is not None
        try:
            outcome = run_job(
                *(command, ranks, log_dir, display.line, display.metrics),
                saves=saves,
                variables=node_environment(nodes, os.environ),
            )
        except JobStopped as stop:
            outcome = Outcome(128 + stop.number, "", stopped_by=stop.number)
        display.end()
    print_outcome(outcome, log_dir)
    return outcome


def log_dir_of_node(job: Job, plan: Plan | None, nodes: Nodes) -> Path:
    """The folder for the logs: the one that flags name, or a new one named after the time, the model and the
    node."""
    if job.output.log_dir is not None:
        return Path(job.output.log_dir)
    spec = job.model.spec() if plan is None else plan.model
    node = "" if nodes.node is None else f"-node{nodes.node}"
    return Path(f"runs/{datetime.now():%Y%m%d-%H%M%S}-{Path(spec.name).name}{node}")
