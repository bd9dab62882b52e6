"""Resumption of a job from its own checkpoints."""

from __future__ import annotations

from dataclasses import replace

from runtime.job.job import Job


def continuation(job: Job) -> Job:
    """The job that continues this one, from its newest checkpoint if there is one."""
    return from_saved(job) if has_saved(job) else job


def has_saved(job: Job) -> bool:
    """Return whether there is a checkpoint in the folder that a job saves in."""
    from runtime import checkpoint

    return job.output.save is not None and checkpoint.latest_iteration(job.output.save) is not None


def from_saved(job: Job) -> Job:
    """The job, resumed from the newest checkpoint in the folder that it saves in."""
    output = job.output
    # Optimizer states that were not saved cannot be loaded.
    again = replace(
        output, load=output.save, ckpt_step=None, finetune=False, no_load_optim=output.no_save_optim
    )
    return replace(job, output=again)
