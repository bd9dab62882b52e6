"""A job described by its flags."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.flags import arguments, flag
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from runtime.data import Datasets
from runtime.data.identity import identity
from runtime.faults.fault_options import FaultOptions
from runtime.preflight.preflight_options import PreflightOptions
from runtime.settings.checks import TIMEOUT
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions


@dataclass(frozen=True)
class RunOptions:
    """The plan to run, and the timeout of its collectives."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "Job"}

    plan: str | None = flag(None, "Plan file of `planner suggest --save`; without it rank 0 plans.")
    distributed_timeout_minutes: float = flag(
        10.0, "Minutes after which a stuck collective is an error.", within=TIMEOUT
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """The flags of a run: the groups of every command that trains, in the order of their help."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    data: DataOptions = field(default_factory=DataOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    run: RunOptions = field(default_factory=RunOptions)
    faults: FaultOptions = field(default_factory=FaultOptions)
    preflight: PreflightOptions = field(default_factory=PreflightOptions)

    def with_plan(self, path: str | Path) -> Job:
        """The job with its model, cluster, batch and layout read from a plan file."""
        run = replace(self.run, plan=str(path))
        return Job(
            run=run,
            training=self.training,
            data=self.data,
            faults=self.faults,
            preflight=self.preflight,
            output=self.output,
        )

    def with_log_dir(self, path: str | Path) -> Job:
        """The job with its logs in the folder `path`."""
        return replace(self, output=replace(self.output, log_dir=str(path)))

    def arguments(self) -> list[str]:
        """The command-line words for these flags, the plan first, without defaults."""
        groups = sorted(fields(self), key=lambda group: group.name != "run")
        return [word for group in groups for word in arguments(getattr(self, group.name))]


def first_train_samples(job: Job, iteration: int) -> int | None:
    """The number of samples for which the training order was made, for a run that continues after
    `iteration`.

    None for a new run, and for a checkpoint without this number.
    """
    if not iteration or job.output.load is None:
        return None
    # Seconds of PyTorch, which whoever only plans need not wait for.
    from runtime.checkpoint.folders import iteration_folder
    from runtime.checkpoint.run_file import read_run

    told = read_run(iteration_folder(job.output.load, iteration)).run_state()
    samples = told.get("train_samples")
    return samples if isinstance(samples, int) and samples > 0 else None


def sample_order(job: Job, datasets: Datasets) -> dict[str, Any]:
    """The settings that decide the order of training samples; they must be the same when a run continues."""
    blend = datasets.blends[0] if datasets.blends else None
    files = datasets.indexed if blend is None else datasets.indexed[: len(set(blend.prefixes))]
    order: dict[str, Any] = {
        "seed": job.training.seed,
        "split": job.data.split,
        "tokens": sum(indexed.token_count for indexed in files),
        "data": identity(files),
    }
    if blend is not None and len(blend.prefixes) > 1:
        order["blend"] = list(blend.weights or [indexed.token_count for indexed in files])
    return order
