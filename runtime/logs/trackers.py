"""Tracking services for runs: Weights & Biases and MLflow, if they are installed.

Both have modes that need no network: WANDB_MODE=offline, and a folder or file as MLflow's tracking URI.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from costmodels.errors import InputError
from runtime.logs.console import say

ANSWER_S = 60.0
"""Seconds without an answer after which a service gets no more figures; the first answer includes the import
of its package."""

END_S = 30.0
"""Seconds that a run waits at its end for services to receive the last figures."""


class Tracker(Protocol):
    """The record of a run at a service."""

    def log(self, figures: Mapping[str, float], iteration: int) -> None:
        """Add figures of an iteration."""

    def close(self) -> None:
        """End the run."""


class WandbRun:
    """A run of Weights & Biases."""

    def __init__(
        self, project: str, name: str | None, folder: str | None, settings: Mapping[str, Any]
    ) -> None:
        self.wandb = import_module("wandb")
        self.run = self.wandb.init(project=project, name=name, dir=folder, config=dict(settings))

    def log(self, figures: Mapping[str, float], iteration: int) -> None:
        """Add figures of an iteration."""
        self.run.log(dict(figures), step=iteration)

    def close(self) -> None:
        """End the run, and wait until its file is complete, as `finish` returns earlier."""
        self.run.finish()
        self.wandb.teardown()


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, experiment: str, uri: str | None, settings: Mapping[str, Any]) -> None:
        mlflow = import_module("mlflow")
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
    """All services of a run. Each service has its own thread, so that none delays the run. A service that
    fails or does not answer is reported once, and the run continues without it."""

    def __init__(self, starts: Mapping[str, Callable[[], Tracker]]) -> None:
        self.running = {name: _Service(name, start) for name, start in starts.items()}

    def log(self, figures: Mapping[str, Any], iteration: int) -> None:
        """Add the numeric figures of an iteration."""
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, (int, float))}
        for service in self.running.values():
            service.log(numbers, iteration)

    def close(self) -> None:
        """End all runs, and wait some time for services that have answered so far."""
        for service in self.running.values():
            service.end()
        deadline = time.monotonic() + END_S
        for service in self.running.values():
            service.wait(deadline)


class _Service:
    """A tracker that a thread starts, feeds and ends."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name = name
        self.waiting: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue()
        self.is_told = self.has_ended = False
        self.busy_since: float | None = time.monotonic()
        """The time since which a request to the service is unanswered; None while it has nothing to do."""
        self.thread = threading.Thread(target=self._serve, args=(start,), name=name, daemon=True)
        self.thread.start()

    def log(self, figures: Mapping[str, float], iteration: int) -> None:
        """Queue figures; a service that is too slow is reported, and gets no more."""
        since = self.busy_since
        if since is not None and time.monotonic() - since > ANSWER_S:
            self._tell(f"no answer for {ANSWER_S:g} s")
        if not self.is_told:
            self.waiting.put((figures, iteration))

    def end(self) -> None:
        """Let the thread end after all figures have been sent."""
        self.waiting.put(None)

    def wait(self, deadline: float) -> None:
        """Wait for the thread until `deadline`, unless the service has failed."""
        if not self.is_told:
            self.thread.join(max(0.0, deadline - time.monotonic()))
            if not self.has_ended:
                self._tell(f"no answer for {END_S:g} s at the end")

    def _serve(self, start: Callable[[], Tracker]) -> None:
        try:
            tracker = start()
            self.busy_since = None
            while (figures := self.waiting.get()) is not None:
                self.busy_since = time.monotonic()
                tracker.log(*figures)
                self.busy_since = None
            self.busy_since = time.monotonic()
            tracker.close()
        except Exception as error:
            self._tell(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        finally:
            self.busy_since, self.has_ended = None, True

    def _tell(self, why: str) -> None:
        if self.is_told:
            return
        self.is_told = True
        say(f"warning: {self.name} gets no more figures ({why}); the run goes on", sys.stderr)


def check_installed(module: str, flag: str, extra: str) -> None:
    """Raise `InputError`, which names `flag`, where the package of a service is missing."""
    if find_spec(module) is None:
        raise InputError(f"{flag} needs the package {module}: pip install 'llm-parallelism-planner[{extra}]'")
