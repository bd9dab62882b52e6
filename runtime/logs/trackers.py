"""Services that keep the figures of runs: Weights & Biases and MLflow, where they are installed.

Both have modes that need no network: WANDB_MODE=offline, and a folder or file as MLflow's tracking URI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from costmodels.errors import InputError
from runtime.logs.console import say


class Tracker(Protocol):
    """A run that a service keeps."""

    def log(self, figures: Mapping[str, float], iteration: int) -> None:
        """Add figures of an iteration."""

    def close(self) -> None:
        """End the run."""


class WandbRun:
    """A run of Weights & Biases."""

    def __init__(
        self, project: str, name: str | None, folder: str | None, settings: Mapping[str, Any]
    ) -> None:
        self.wandb = _imported("wandb", "--wandb-project", "wandb")
        self.run = self.wandb.init(project=project, name=name, dir=folder, config=dict(settings))

    def log(self, figures: Mapping[str, float], iteration: int) -> None:
        """Add figures of an iteration."""
        self.run.log(dict(figures), step=iteration)

    def close(self) -> None:
        """End the run, and wait until its file is whole: `finish` returns before it is written."""
        self.run.finish()
        self.wandb.teardown()


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, experiment: str, uri: str | None, settings: Mapping[str, Any]) -> None:
        mlflow = _imported("mlflow", "--mlflow-experiment", "mlflow")
        if uri is not None:
            mlflow.set_tracking_uri(uri)
        self.client = mlflow.MlflowClient()
        found = self.client.get_experiment_by_name(experiment)
        number = self.client.create_experiment(experiment) if found is None else found.experiment_id
        self.run = self.client.create_run(number).info.run_id
        for name, value in settings.items():
            self.client.log_param(self.run, name, str(value)[:500])

    def log(self, figures: Mapping[str, float], iteration: int) -> None:
        """Add figures of an iteration."""
        for name, value in figures.items():
            self.client.log_metric(self.run, name.replace("/", "."), value, step=iteration)

    def close(self) -> None:
        """End the run."""
        self.client.set_terminated(self.run)


class Trackers:
    """All services of a run; one that fails is told once, and the run goes on without it."""

    def __init__(self, starts: Mapping[str, Callable[[], Tracker]]) -> None:
        self.running: dict[str, Tracker] = {}
        for name, start in starts.items():
            try:
                self.running[name] = start()
            except InputError:
                raise
            except Exception as error:
                self._drop(name, error)

    def log(self, figures: Mapping[str, Any], iteration: int) -> None:
        """Add those figures of an iteration that are numbers."""
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, (int, float))}
        self._all(lambda tracker: tracker.log(numbers, iteration))

    def close(self) -> None:
        """End all runs."""
        self._all(lambda tracker: tracker.close())

    def _all(self, work: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.running.items()):
            try:
                work(tracker)
            except Exception as error:
                self.running.pop(name)
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        what = " ".join(str(error).split())[:200]
        say(
            f"warning: {name} gets no more figures ({type(error).__name__}: {what}); the run goes on",
            sys.stderr,
        )


def _imported(module: str, flag: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{flag} needs the package {module}: pip install 'llm-parallelism-planner[{extra}]'"
        ) from None
