"""Comparison of a run's ranks, so that the log names a slow one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from runtime.faults.stragglers import Work, has_enough_samples, slowest_rank, straggler_line
from runtime.faults.watchdog import Watchdog
from runtime.train.trainer import Trainer


class SlowRanks:
    """The samples of all ranks' watchdogs, compared at log lines."""

    def __init__(self, watchdog: Watchdog | None, trainer: Trainer, factor: float) -> None:
        self.trainer, self.factor = trainer, factor
        self.sampler = None if watchdog is None or not factor else watchdog.sampler
        self.warms_up = True
        self.hosts: list[str] = []
        if watchdog is not None and self.sampler is not None:
            self.hosts = [""] * dist.get_world_size()
            dist.all_gather_object(self.hosts, watchdog.host)
            self.sampler.restart()

    def count_step(self) -> None:
        """Count a finished training step, except the first one, which warms up."""
        if self.sampler is None:
            return
        if self.warms_up:
            self.warms_up = False
            self.sampler.restart()
        else:
            self.sampler.steps += 1

    def line(self) -> str:
        """The line that names a slow rank; empty if there is none. Every rank calls it."""
        if self.sampler is None:
            return ""
        device = self.trainer.grid.device
        mine = torch.tensor([*self.sampler.work(), self.trainer.grid.pp_rank], dtype=torch.float64)
        table = torch.zeros(len(self.hosts), len(mine), dtype=torch.float64, device=device)
        table[dist.get_rank()] = mine.to(device)
        dist.all_reduce(table)
        rows = table.tolist()
        work = [Work(*row[:-1]) for row in rows]
        if not has_enough_samples(work):
            return ""
        self.sampler.restart()
        found = slowest_rank(work, [int(row[-1]) for row in rows], self.factor)
        if found is None:
            return ""
        rank, ratio = found
        return straggler_line(rank, self.hosts[rank], work[rank], ratio)
