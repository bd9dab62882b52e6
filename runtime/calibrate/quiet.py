"""The share of a machine's cores that other processes use during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from costmodels.catalogue.local_machine import available_cores

STAT = Path("/proc/stat")

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""Ticks of the system's CPU counters in a second."""

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a line of cores in /proc/stat that count busy ticks: user, nice, system, interrupts, stolen."""


class Watch:
    """Counts of busy cores since the watch was made; every rank of a job makes its own."""

    def __init__(self) -> None:
        self.started, self.busy, self.own = time.perf_counter(), _busy_s(), time.process_time()

    def others(self) -> float:
        """Share of the machine's cores used by processes other than these ranks since the start, 0 to 1.

        Every rank calls it and gets the same result; 0 where the system does not report it.
        """
        own = torch.tensor(time.process_time() - self.own, dtype=torch.float64)
        elapsed, busy = time.perf_counter() - self.started, _busy_s() - self.busy
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
            dist.all_reduce(own)
        if not busy:
            return 0.0
        share = max(0.0, (busy - float(own)) / (elapsed * available_cores()))
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
            first = torch.tensor(share, dtype=torch.float64)
            dist.broadcast(first, 0)
            share = float(first)
        return share


def _busy_s() -> float:
    """Busy seconds of all cores since the machine started; 0 where the system does not report it."""
    try:
        line = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
        return sum(float(line[column]) for column in BUSY) / TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
