"""A few steps of a run under PyTorch's profiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from planner.history.step_parts import StepParts
from runtime.logs.console import say
from runtime.parallel.accelerator import device_module, is_accelerator
from runtime.profiling.parts import OPTIMIZER_RANGE, STEP_RANGE, Event, step_parts

CPU = torch._C._autograd.DeviceType.CPU

WARM_UP = 4
"""Number of steps before the profiled ones."""

STEPS = 2
"""Number of profiled steps."""

FEWEST_STEPS = 20
"""Fewest steps of a run with profiling; in shorter runs the profiled steps would be a large part."""

UPDATES = ("squared_norm", "scale", "clip_values", "step")
"""Methods of a trainer's optimizer in a step, except the reduction of gradients."""

ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
"""Profiler activities by device name; devices of extensions (NPUs) have the last one."""


@contextmanager
def profiled(device: torch.device) -> Iterator[list[Event]]:
    """Profile within this context; the list of events is filled at the end."""
    # The profiler's library warns of GPUs that are not there.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    wanted = ACTIVITIES.get(device.type, ProfilerActivity.PrivateUse1)
    if is_accelerator(device) and wanted in supported_activities():  # type: ignore[no-untyped-call]
        activities.append(wanted)
    found: list[Event] = []
    profiler = profile(activities=activities)
    profiler.start()
    try:
        yield found
    finally:
        profiler.stop()
    found += _events(profiler)


def _events(profiler: Any) -> Iterator[Event]:
    """Events of a finished profiler, without PyTorch's objects for each."""
    for event in profiler.profiler.kineto_results.events():
        start, on_device = event.start_ns(), event.device_type() != CPU
        yield Event(
            event.name(),
            start,
            start + event.duration_ns(),
            event.device_resource_id() if on_device else event.start_thread_id(),
            on_device,
            event.is_user_annotation() or event.name() in (STEP_RANGE, OPTIMIZER_RANGE),
            event.is_async(),
            event.correlation_id(),
            event.linked_correlation_id(),
        )


@contextmanager
def named_updates(optimizer: Any) -> Iterator[None]:
    """Mark the optimizer step for the profiler within this context."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with record_function(OPTIMIZER_RANGE):
                return function(*args)

        return call

    with ExitStack() as stack:
        for name in UPDATES:
            stack.enter_context(patch.object(optimizer, name, named(getattr(optimizer, name))))
        yield


@contextmanager
def profiled_step(optimizer: Any, device: torch.device) -> Iterator[None]:
    """Mark a step for the profiler, including its queued device work."""
    with named_updates(optimizer), record_function(STEP_RANGE):
        yield
        if is_accelerator(device):
            device_module(device).synchronize(device)


class ProfileWindow:
    """The steps of a run that its first rank profiles."""

    def __init__(self, first: int | None, is_profiler: bool, device: torch.device) -> None:
        """
        Args:
            first: iteration of the first profiled step; None for no profiling.
            is_profiler: True if this rank profiles; other ranks only know the profiled steps.
        """
        self.first, self.is_profiler, self.device = first, is_profiler, device
        self.parts: StepParts | None = None
        """Seconds by part; None before the end, on other ranks, and where the profiler has failed."""
        self._events: list[Event] = []
        self._open: Any = None

    def holds(self, iteration: int) -> bool:
        """Return whether an iteration is profiled."""
        return self.first is not None and self.first <= iteration < self.first + STEPS

    @contextmanager
    def step(self, iteration: int, optimizer: Any) -> Iterator[None]:
        """Run the step of an iteration for which `holds` is true, with profiling."""
        if not self.is_profiler:
            yield
            return
        if iteration == self.first:
            self._start()
        if self._open is None:
            yield
            return
        with profiled_step(optimizer, self.device):
            yield
        if not self.holds(iteration + 1):
            self._stop()

    def _start(self) -> None:
        try:
            opened = profiled(self.device)
            self._events = opened.__enter__()
            self._open = opened
        except Exception as error:
            _give_up(error)

    def _stop(self) -> None:
        opened, self._open = self._open, None
        try:
            opened.__exit__(None, None, None)
            self.parts = step_parts(self._events)
        except Exception as error:
            _give_up(error)
        self._events = []


def _give_up(error: Exception) -> None:
    """Stop profiling after an error of the profiler, so that the run continues."""
    say(f"note: no profile of this run ({type(error).__name__}: {error})", sys.stderr)


def first_profiled(start: int, last: int) -> int | None:
    """The first iteration to profile in a run from after `start` to `last`; None for a short run."""
    return start + WARM_UP + 1 if last - start >= FEWEST_STEPS else None
