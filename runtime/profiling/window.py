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
"""Steps of a run before those that are profiled."""

STEPS = 2
"""Steps that are profiled."""

FEWEST_STEPS = 20
"""Steps of a run of which some are profiled; in shorter ones they would be much of it."""

UPDATES = ("squared_norm", "scale", "clip_values", "step")
"""Methods of a trainer's optimizer in a step, but for the reduction of gradients."""

ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
"""Activities by the name of a device; those that an extension brings (NPUs) have the last one."""


@contextmanager
def profiled(device: torch.device) -> Iterator[list[Event]]:
    """Profile what happens meanwhile; the list is filled at the end."""
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
    """Events of a profiler that has ended, without the objects that PyTorch makes of each."""
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
    """Let the profiler see when an optimizer works."""

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
    """Let the profiler see a step as one, with all the work that it has given to a device."""
    with named_updates(optimizer), record_function(STEP_RANGE):
        yield
        if is_accelerator(device):
            device_module(device).synchronize(device)


class ProfileWindow:
    """The steps of a run that its first rank profiles."""

    def __init__(self, first: int | None, is_profiler: bool, device: torch.device) -> None:
        """
        Args:
            first: iteration of the first of them; None where there are to be none.
            is_profiler: this rank profiles; others only know when.
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
        """Take the step of an iteration in which `holds`."""
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
    """Whatever a profiler does, the run goes on."""
    say(f"note: no profile of this run ({type(error).__name__}: {error})", sys.stderr)


def first_profiled(start: int, last: int) -> int | None:
    """The first iteration to profile of a run that goes from after `start` to `last`; None of a short one."""
    return start + WARM_UP + 1 if last - start >= FEWEST_STEPS else None
