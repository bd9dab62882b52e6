"""Checks before the ranks of a job start: the machine, the data, and a folder for logs."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path

from planner.plan import Plan
from runtime.checkpoint.owner import ownership
from runtime.job.datasets import model_tokenizer, open_datasets
from runtime.job.job import Job
from runtime.settings.checks import check_folder, check_host


def log_dir_of(job: Job, plan: Plan) -> Path:
    """The folder that flags name for the logs of a job, or one named after the time and the model."""
    name = f"runs/{datetime.now():%Y%m%d-%H%M%S}-{Path(plan.model.name).name}"
    return Path(job.output.log_dir or name)


def check_machine(plan: Plan, job: Job) -> None:
    """Raise `InputError` where this machine lacks memory for the ranks, or a folder belongs to another
    run."""
    ranks = plan.layout.world_size
    if plan.cluster.device.kind == "cpu":
        source = f"the plan {job.run.plan}" if job.run.plan else f"--world-size {ranks}"
        check_host(ranks, source, plan.estimate.peak_memory_bytes)
    for name, folder in (("--save", job.output.save), ("--tensorboard-dir", job.output.tensorboard_dir)):
        if folder is not None:
            check_folder(folder, name)
    if job.output.save is not None:
        with ownership(Path(job.output.save), f"--save {job.output.save}"):
            pass  # The first rank takes it over; who cannot have it need not start ranks.


def prepare_data(plan: Plan, job: Job) -> None:
    """Open the data once before ranks start, which checks it and prepares the default corpus."""
    samples = job.training.batches(plan.layout).total(job.training.train_iters)
    evaluated = job.output.eval_iters * plan.layout.global_batch_size
    own = model_tokenizer(job.output.load, job.model.model)
    open_datasets(job.data, plan.model, job.training.seed, samples, evaluated, own)


def make_log_dir(path: Path, is_new: bool) -> Path:
    """Make the folder for the logs of a job, and return its path.

    If it `is_new`, no other job gets the same folder: a number is added to a name that just came into use.
    """
    made = path
    if is_new:
        check_folder(path.parent, "--log-dir")
        for number in itertools.count(2):
            try:
                made.mkdir()
                break
            except FileExistsError:
                made = path.with_name(f"{path.name}-{number}")
    return check_folder(made, "--log-dir")
