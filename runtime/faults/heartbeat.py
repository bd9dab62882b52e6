"""The current operation of this rank: attributes that the training thread sets and a watching thread reads.

Setting them takes a fraction of a microsecond and never uses the device. Times are from the monotonic clock.
Only durations are sent to other ranks, as clocks of hosts are never compared.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

STEP_OPERATIONS = (
    "loading data",
    "forward",
    "backward",
    "reduction of gradients",
    "all-reduce of loss and gradient norm",
    "optimizer step",
)
"""The operations of a training step."""

MEETINGS = ("all-reduce of loss and gradient norm", "waiting for the others to end")
"""Operations in which a rank waits for the slowest rank; on a GPU this wait is not visible in Python."""

_WAITING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/",
    "torch/distributed/pipelining/schedules.py",
)
"""Python files whose code blocks until other ranks arrive."""

_DISPATCH = ("torch/_ops.py", "torch/utils/_contextlib.py", "contextlib.py")
"""Files of PyTorch between an operator and its caller."""

_ROOT = Path(__file__).parents[2]


class Activity(NamedTuple):
    """The operation of a rank, and the time at which it began."""

    operation: str
    micro_batch: int | None
    """The number of the microbatch, from 1."""
    period: str
    """The phase of the run, such as `iteration 12`."""
    iteration: int
    """Number of steps that have begun."""
    in_step: bool
    """True if the activity is a part of a training step."""
    since: float
    """Time of the begin, in seconds of this machine's monotonic clock."""

    def describe(self) -> str:
        """The operation in words, such as `forward of microbatch 3 of iteration 12`."""
        part = "" if self.micro_batch is None else f" of microbatch {self.micro_batch}"
        return f"{self.operation}{part}" + (f" of {self.period}" if self.period else "")


class _Current:
    def __init__(self) -> None:
        self.period, self.iteration, self.in_step = "", 0, False
        self.activity = Activity("start", None, "", 0, False, time.monotonic())


_current = _Current()


def set_operation(operation: str, micro_batch: int | None = None) -> None:
    """Set the operation that this rank starts; microbatches are numbered from 1."""
    now = _current
    now.activity = Activity(operation, micro_batch, now.period, now.iteration, now.in_step, time.monotonic())


def set_period(period: str, iteration: int, in_step: bool = False) -> None:
    """Set the phase of the following operations, such as `iteration 12`, a training step."""
    _current.period, _current.iteration, _current.in_step = period, iteration, in_step


def activity() -> Activity:
    """The current operation of this rank."""
    return _current.activity


def leave_out(seconds: float) -> None:
    """Exclude time in which the process did not run because it was stopped or the machine was busy."""
    now = _current.activity
    _current.activity = now._replace(since=now.since + seconds)


def is_waiting(frame: FrameType | None) -> bool:
    """True if the thread with this innermost frame waits for other ranks, as far as Python shows it."""
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH):
        frame = frame.f_back
    return frame is not None and any(part in frame.f_code.co_filename for part in _WAITING)


def is_main_waiting() -> bool:
    """Return whether this rank's training thread waits for other ranks."""
    return _current.activity.operation in MEETINGS or is_waiting(main_frame())


def main_frame() -> FrameType | None:
    """The innermost frame of the training thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frame_place(frame: FrameType | None) -> str:
    """File, line and function of a frame, such as `runtime/loop.py:91 in step`."""
    if frame is None:
        return "an unknown place"
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else "/".join(path.parts[-2:])
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
