"""Horovod's part of the data-parallel study, on ranks of a worker pool: the library itself rarely builds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.data_parallel_methods import Curve, Job, train_by_horovod


class DistributedOptimizer:
    """An optimizer as Horovod's: averages in `synchronize`, and again in `step` unless that is skipped."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Any) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for _, parameter in named_parameters]
        self.skipping = False

    def synchronize(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.skipping = True
        yield
        self.skipping = False

    def step(self) -> None:
        assert self.skipping, "gradients would be summed again, after they were clipped"
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def train_by_stand_in(job: Job, batches: list[np.ndarray]) -> Curve:
    """`train_by_horovod` with a module of the same words."""
    stand_in: Any = ModuleType("horovod.torch")
    stand_in.init = lambda: None
    stand_in.rank = stand_in.local_rank = dist.get_rank
    stand_in.size = stand_in.local_size = dist.get_world_size
    stand_in.DistributedOptimizer = DistributedOptimizer
    package: Any = ModuleType("horovod")
    package.torch = stand_in
    sys.modules |= {"horovod": package, "horovod.torch": stand_in}
    return train_by_horovod(job, batches)
