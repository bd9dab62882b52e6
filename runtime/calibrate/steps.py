"""Seconds and bytes of a few training steps of a layout, on initialised ranks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from costmodels import Layout, ModelSpec
from runtime.calibrate.quiet import Watch
from runtime.job.attention_choice import AUTO, use_attention
from runtime.job.metrics import peak_memory_bytes
from runtime.parallel.accelerator import device_module, is_accelerator
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer

WARM_UP = 2
"""Number of warm-up steps, which allocate, compile and make the optimizer's state."""

LEAST_STEPS, MOST_STEPS, ENOUGH_S = 3, 15, 0.5
"""Least and largest number of timed steps, and their seconds; short steps are timed more often."""

DISTURBED, MOST_TURNS = 0.08, 5
"""Largest share of the cores that other processes may use while steps are timed, and most repetitions of the
timing."""


class MeasuredSteps(NamedTuple):
    """A layout that was run for a few steps."""

    step_time_s: float
    """Mean of the middle half of the steps."""
    peak_memory_bytes: int
    """The largest logged peak memory of all ranks, in bytes."""
    others: float
    """Share of the cores that other processes used during these steps."""


def measure_steps(
    spec: ModelSpec, layout: Layout, device: torch.device, enough_s: float = ENOUGH_S
) -> MeasuredSteps:
    """Train `layout` for a few steps of random tokens; every rank calls it and gets the same answer.

    Steps disturbed by other processes are timed again, and the least disturbed ones count.

    Args:
        enough_s: seconds of timed steps, within the least and largest number.
    """
    use_attention(AUTO, spec, layout, device)
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=10**6), device)
    draw = np.random.RandomState(0)
    batch = draw.randint(0, spec.vocab, (layout.global_batch_size, spec.seq + 1))[trainer.rows]
    gc.collect()
    gc.disable()  # As a run does between its log lines.
    started = time.perf_counter()
    for _ in range(WARM_UP):
        trainer.train_step(batch)
        one = time.perf_counter() - started
        started = time.perf_counter()
    # The first rank's clock decides for all.
    first = torch.tensor(one, dtype=torch.float64, device=device)
    dist.broadcast(first, 0)
    count = min(MOST_STEPS, max(LEAST_STEPS, round(enough_s / float(first))))
    turns = []
    for _ in range(MOST_TURNS):
        dist.barrier()
        watch = Watch()
        seconds = middle_mean([_step_seconds(trainer, batch, device) for _ in range(count)])
        turns.append((watch.others(), seconds))
        if turns[-1][0] <= DISTURBED:
            break
    gc.enable()
    others, seconds = min(turns)
    figures = torch.tensor([seconds, float(peak_memory_bytes(device))], dtype=torch.float64, device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return MeasuredSteps(float(figures[0]), int(figures[1]), others)


def middle_mean(values: Sequence[float]) -> float:
    """Mean of the middle half: as stable as a mean, and not affected by outliers."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _step_seconds(trainer: Trainer, batch: npt.NDArray[np.int64], device: torch.device) -> float:
    started = time.perf_counter()
    trainer.train_step(batch)
    if is_accelerator(device):
        device_module(device).synchronize(device)
    return time.perf_counter() - started
