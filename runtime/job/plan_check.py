"""The check, before ranks build the model, that a plan can be trained with a job's flags."""

from __future__ import annotations

from planner.plan import Plan
from runtime.job.job import Job
from runtime.settings.checks import check_plan, check_training


def check_plan_of_job(plan: Plan, job: Job, world_size: int) -> None:
    """Raise `InputError` for a plan that the runtime cannot execute on `world_size` ranks, or that flags
    contradict; also for a checkpoint of another model.
    """
    check_plan(plan, world_size)
    check_training(plan, job.training, job.data)
    if job.output.load is not None or plan.model.lora is not None:
        # Seconds of PyTorch, which a job that begins anew need not wait for.
        from runtime.job.initial_state import check_loaded

        check_loaded(job.output, plan.model)
    job.faults.check(job.output.log_dir, job.run.distributed_timeout_minutes)
