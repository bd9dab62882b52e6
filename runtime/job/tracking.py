"""The tracking services that a run's flags name."""

from __future__ import annotations

from collections.abc import Callable

from planner.plan import Plan
from runtime.job.job import Job
from runtime.logs.trackers import MlflowRun, Tracker, Trackers, WandbRun, check_installed


def run_trackers(job: Job, plan: Plan) -> Trackers:
    """The started tracking services of a run, with its layout as settings.

    Raises `InputError` for a service that is not installed.
    """
    output = job.output
    settings = {
        "model": plan.model.name,
        "device": plan.cluster.device.name,
        "world_size": plan.layout.world_size,
        "layout": plan.layout.describe(),
        "predicted_step_time_s": plan.estimate.step_time_s,
    }
    starts: dict[str, Callable[[], Tracker]] = {}
    if output.wandb_project is not None:
        check_installed("wandb", "--wandb-project", "wandb")
        project = output.wandb_project
        folder = output.wandb_save_dir or output.log_dir
        starts["wandb"] = lambda: WandbRun(project, output.wandb_exp_name, folder, settings)
    if output.mlflow_experiment is not None:
        check_installed("mlflow", "--mlflow-experiment", "mlflow")
        experiment = output.mlflow_experiment
        starts["mlflow"] = lambda: MlflowRun(experiment, output.mlflow_tracking_uri, settings)
    return Trackers(starts)
