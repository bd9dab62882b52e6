"""A calibration of this machine alone: kernels on some ranks, then each layout on new ranks.

As in real runs, no layout is affected by threads and memory of an earlier one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from costmodels import Layout, ModelSpec
from costmodels.calibration.machine_measurements import Measurements, StepTime
from costmodels.catalogue import load_engine
from costmodels.spec.hardware import Device
from costmodels.spec.table import LayoutTable
from planner.inputs.engine import DEFAULT_ENGINE
from runtime.calibrate.choice import cut_to_size, in_turns, small_problem
from runtime.launch.rank_pool import RankPool
from runtime.launch.warm_ranks import threads_of
from runtime.parallel.ranks import Ranks

if TYPE_CHECKING:
    from runtime.calibrate.steps import MeasuredSteps

KERNELS_SHARE = 0.3
"""The share of the time for kernels; steps have the rest."""

MOST_OTHERS = 0.15
"""Largest share of the cores used by other processes with which steps count, if most steps are less
disturbed."""

Progress = Callable[[float, str], None]


def measure_machine(
    specs: Sequence[ModelSpec], plain: Device, count: int, budget_s: float, progress: Progress
) -> Measurements:
    """Kernels, collectives and steps of models, measured by `count` ranks of this machine.

    Args:
        plain: the catalogue's device, for this number of ranks.
        budget_s: seconds after which no further measurement begins.
        progress: called with the finished share, 0 to 1, and the next task.
    """
    started = time.perf_counter()
    ranks = Ranks(0, 0, count, count)
    pool = RankPool(count, accelerated=plain.kind != "cpu")
    threads = int(os.environ.get("OMP_NUM_THREADS") or threads_of(count))
    progress(0.0, "kernels and collectives")
    models = [(spec, small_problem(spec, plain, ranks).table) for spec in cut(specs, plain, ranks)]
    kernels: Measurements = pool.run(
        _kernels_on_rank, count, models, plain, threads, KERNELS_SHARE * budget_s
    )[0]
    quiet: list[StepTime] = []
    disturbed: list[StepTime] = []
    others = [kernels.others]
    for spec, layout in in_turns(models):
        share = (time.perf_counter() - started) / budget_s
        if share > 1 and (quiet or disturbed):
            break
        progress(min(1.0, share), f"steps of {spec.name}, {layout.describe()}")
        taken: MeasuredSteps = pool.run(step_on_rank, count, spec, layout, plain.kind, threads)[0]
        others.append(taken.others)
        figures = {"seconds": taken.step_time_s, "peak_bytes": taken.peak_memory_bytes}
        step = StepTime.model_validate({"model": spec, "layout": layout, **figures})
        (quiet if taken.others <= MOST_OTHERS else disturbed).append(step)
    steps = quiet if len(quiet) >= len(disturbed) else quiet + disturbed
    return kernels.model_copy(update={"steps": tuple(steps), "others": sum(others) / len(others)})


def cut(specs: Sequence[ModelSpec], plain: Device, ranks: Ranks) -> list[ModelSpec]:
    """The models, each cut so that its steps can be run."""
    return [cut_to_size(spec, plain, ranks) for spec in specs]


def _kernels_on_rank(
    models: Sequence[tuple[ModelSpec, LayoutTable]], plain: Device, threads: int, budget_s: float
) -> Measurements:
    """Measure kernels; runs on every rank."""
    import torch

    from runtime.calibrate.measure import measure_kernels
    from runtime.job.devices import torch_device

    torch.set_num_threads(threads)
    ranks = Ranks.from_environment()
    device = torch_device(plain.kind == "cpu", ranks)
    engine = load_engine(DEFAULT_ENGINE).for_device(plain)
    return measure_kernels(models, engine, ranks, device, budget_s)


def step_on_rank(
    spec: ModelSpec, layout: Layout, kind: str, threads: int, enough_s: float | None = None
) -> MeasuredSteps:
    """A few steps of a layout, or as many as take `enough_s` seconds; runs on every rank."""
    import torch

    from runtime.calibrate.steps import ENOUGH_S, measure_steps
    from runtime.job.devices import torch_device

    torch.set_num_threads(threads)
    device = torch_device(kind == "cpu", Ranks.from_environment())
    return measure_steps(spec, layout, device, ENOUGH_S if enough_s is None else enough_s)
