"""Requests to a training run by signals and by the time limit, which all ranks obey together.

SIGTERM asks for a checkpoint and the end of the run (Megatron-LM's --exit-signal-handler). So do Ctrl-C and a
closed terminal (SIGHUP). SIGUSR1 asks only for a checkpoint, for example some minutes before Slurm's time
limit. A signal may reach any single rank, and is obeyed after the current step.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

START_TIME_S = time.monotonic()
"""The approximate monotonic time at which this process began, in seconds."""


class Request(enum.IntEnum):
    """An action after a step; of several requests the largest counts."""

    NOTHING = 0
    SAVE = 1
    STOP_IN_TIME = 2
    STOP = 3
    HANG_UP = 4
    INTERRUPT = 5

    @property
    def stops(self) -> bool:
        """True if the run ends."""
        return self >= Request.STOP_IN_TIME


SIGNALS: dict[signal.Signals, Request] = {}
"""The request that each signal stands for."""
if hasattr(signal, "SIGUSR1"):
    SIGNALS = {
        signal.SIGTERM: Request.STOP,
        signal.SIGHUP: Request.HANG_UP,
        signal.SIGINT: Request.INTERRUPT,
        signal.SIGUSR1: Request.SAVE,
    }

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a run that Ctrl-C has ended, whether it saved or not."""


def ignore_early() -> None:
    """Ignore requests for a checkpoint until there is something to save."""
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Requests:
    """The requests to this rank, and their agreement among ranks."""

    def __init__(self, exit_minutes: float | None, saves: bool, timeout: timedelta) -> None:
        """
        Args:
            exit_minutes: minutes after the start of rank 0, by its clock, at which the run ends.
            saves: True if the run writes checkpoints, so that signals are handled.
            timeout: time for which a rank waits for the others.
        """
        self.exit_minutes = exit_minutes
        self.saves = saves
        self.pending = Request.NOTHING
        self.is_first = dist.get_rank() == 0
        self.exchanges = dist.get_world_size() > 1 and (saves or exit_minutes is not None)
        # On the host: a GPU would have to finish its work first.
        over_host = "gloo" in dist.get_backend()
        self.group: Any = None
        if self.exchanges and not over_host:
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    @contextmanager
    def signal_handlers(self) -> Iterator[None]:
        """Treat signals as requests within this context; their earlier handlers are restored afterwards."""
        previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        if self.saves:
            # Signals that are ignored stay so: nohup ignores SIGHUP.
            heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            heeded += [] if signal.SIGUSR1 in heeded else [signal.SIGUSR1]
            previous = {number: signal.signal(number, self._note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.pending is Request.INTERRUPT:
            os._exit(INTERRUPTED)  # A second one does not wait.
        self.pending = max(self.pending, SIGNALS[signal.Signals(number)])

    def reason(self, request: Request) -> str:
        """The reason of the run's end, in words."""
        for number, wanted in SIGNALS.items():
            if request is wanted:
                return number.name
        return f"--exit-duration-in-mins {self.exit_minutes:g} has passed"

    def after_step(self) -> Request:
        """The common action of all ranks; every rank calls it after each step, and all get the same
        result."""
        # Signals that arrive from here on are for the next step.
        own, self.pending = self.pending, Request.NOTHING
        limit = self.exit_minutes
        if self.is_first and limit is not None and time.monotonic() - START_TIME_S >= 60 * limit:
            own = max(own, Request.STOP_IN_TIME)
        if not self.exchanges:
            return own
        largest = torch.tensor(int(own))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return Request(int(largest))
