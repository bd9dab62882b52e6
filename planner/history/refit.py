"""Constants of a machine from measurements of its jobs, and their errors for jobs that were left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from costmodels.calibration.machine_fit import batches_of, prices, refitted_device, with_constants
from costmodels.calibration.machine_measurements import StepTime
from costmodels.catalogue import load_engine
from costmodels.catalogue.measured_devices import Machine
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import StepTime as StepSeconds
from costmodels.spec.hardware import Device
from planner.history.file import PastRun
from planner.history.step_parts import TERMS, StepParts, predicted_parts
from planner.inputs.device import resolve_device
from planner.inputs.engine import DEFAULT_ENGINE

FEWEST_LAYOUTS = 4
"""Least number of models and layouts that must have run; fewer could be fitted by any constants."""

SMALLEST = 0.02
"""Least share of a step with which a term is used to fit the machine's speed."""

FOLDS = 8
"""Most fits of the cross-validation, each without a part of the runs."""


class Seen(NamedTuple):
    """The median measurements of runs of one model and layout."""

    step: StepTime
    parts: StepParts | None


@dataclass(frozen=True)
class Refit:
    """Constants of a machine's devices for a number of ranks, fitted to the history."""

    ranks: int
    device: Device
    """The device with the constants that fit all runs."""
    runs: int
    steps: tuple[StepTime, ...]
    """The median step of each model and layout."""
    before: tuple[float, ...]
    """Predicted over measured time of each of `steps`, by the present constants."""
    left_out: tuple[float, ...]
    """Predicted over measured time of each of `steps`, by constants fitted without it."""
    after: tuple[float, ...]
    """Predicted over measured time of each of `steps`, by constants fitted with it."""

    @property
    def is_better(self) -> bool:
        """True if left-out steps have smaller errors than with the present constants."""
        return median_error(self.left_out) < median_error(self.before)

    def as_json(self) -> dict[str, Any]:
        """The figures for JSON; errors in per cent."""
        return {
            "ranks": self.ranks,
            "device": self.device.name,
            "runs": self.runs,
            "layouts": len(self.steps),
            "median_error_percent": {
                "before": 100 * median_error(self.before),
                "left_out": 100 * median_error(self.left_out),
                "after": 100 * median_error(self.after),
            },
            "kept": self.is_better,
        }


def median_error(ratios: Sequence[float]) -> float:
    """Median of the absolute errors of predicted over measured times."""
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def refits(runs: Sequence[PastRun], torch: str, machine: Machine | None = None) -> list[Refit]:
    """The constants fitted to the runs of this machine, for each number of ranks that has enough runs.

    Args:
        runs: runs of the whole history.
        torch: installed version of PyTorch; runs of other versions do not count.

    Raises:
        InputError: no number of ranks has enough runs; the message names the missing runs.
    """
    machine = machine or Machine.here()
    here = [run for run in runs if run.machine == machine]
    usable = [run for run in here if _is_of(run, torch)]
    groups: dict[tuple[str, int], list[PastRun]] = {}
    for run in usable:
        if run.cluster.nodes == 1 and not run.cluster.parts:
            groups.setdefault((run.cluster.device.name, run.cluster.world_size), []).append(run)
    found = {key: _seen(group) for key, group in groups.items()}
    enough = [key for key, seen in found.items() if len(seen) >= FEWEST_LAYOUTS]
    if not enough:
        raise InputError(_missing(runs, here, usable, found, torch))
    return [_refit(name, ranks, groups[name, ranks], found[name, ranks]) for name, ranks in sorted(enough)]


def _missing(
    runs: Sequence[PastRun],
    here: Sequence[PastRun],
    usable: Sequence[PastRun],
    found: dict[tuple[str, int], list[Seen]],
    torch: str,
) -> str:
    """The reason why the history has too few runs, and the commands that add runs."""
    more = f"planner sweep, or planner launch --try {FEWEST_LAYOUTS}, measures several"
    if not runs:
        return f"the history holds no run; {more}"
    if not here:
        return f"the history holds {len(runs)} runs, none of them on this machine; {more}"
    if not usable:
        return f"the history holds {len(here)} runs on this machine, none with PyTorch {torch}; {more}"
    most = max((len(seen) for seen in found.values()), default=0)
    return (
        f"the history holds {len(usable)} runs on this machine with PyTorch {torch}, of {most} layouts with "
        f"as many ranks: at least {FEWEST_LAYOUTS} are needed; {more}"
    )


def _seen(runs: Sequence[PastRun]) -> list[Seen]:
    """The median step, the largest peak and the last parts of each model and layout."""
    same: dict[str, list[PastRun]] = {}
    for run in runs:
        same.setdefault(run.model.model_dump_json() + run.layout.model_dump_json(), []).append(run)
    found = []
    for some in same.values():
        step = StepTime(
            model=some[0].model,
            layout=some[0].layout,
            seconds=statistics.median(run.step_time_s for run in some),
            peak_bytes=round(max(run.peak_memory_bytes for run in some)),
        )
        parts = [run.parts for run in some if run.parts is not None]
        found.append(Seen(step, parts[-1] if parts else None))
    return found


def _refit(name: str, ranks: int, runs: Sequence[PastRun], seen: list[Seen]) -> Refit:
    engine, device = load_engine(DEFAULT_ENGINE), resolve_device(name, ranks)
    left_out = np.zeros(len(seen))
    for fold in (list(range(start, len(seen), FOLDS)) for start in range(min(FOLDS, len(seen)))):
        others = [one for place, one in enumerate(seen) if place not in fold]
        fitted = _fitted(device, engine, ranks, others)
        left_out[fold] = ratios([seen[place].step for place in fold], fitted, engine, ranks)
    fitted, steps = _fitted(device, engine, ranks, seen), [one.step for one in seen]
    source = f"as {len(runs)} runs of {len(steps)} layouts measured it on this machine"
    return Refit(
        ranks,
        fitted.model_copy(update={"source": source}),
        len(runs),
        tuple(steps),
        tuple(ratios(steps, device, engine, ranks)),
        tuple(left_out.tolist()),
        tuple(ratios(steps, fitted, engine, ranks)),
    )


def _fitted(device: Device, engine: Engine, ranks: int, seen: Sequence[Seen]) -> Device:
    """A device whose constants fit whole steps; the fit starts from the parts of steps."""
    start = _started(device, engine, ranks, seen)
    return refitted_device(start, engine, ranks, [one.step for one in seen])


def _started(device: Device, engine: Engine, ranks: int, seen: Sequence[Seen]) -> Device:
    """The device with the speed of each term from parts of steps; without parts, from whole steps."""
    logs: dict[str, list[float]] = {name: [] for name in TERMS}
    whole = []
    for step, parts in seen:
        (batch,) = batches_of([step])
        found = prices(batch, device, engine, ranks)
        whole.append(math.log(found.step_time_s[0] / step.seconds))
        predicted = predicted_parts(
            StepSeconds(**{name: float(each[0]) for name, each in found.time.items()})
        )
        measured = {} if parts is None else parts.by_term()
        for name, seconds in measured.items():
            if min(seconds, predicted[name]) > SMALLEST * step.seconds:
                logs[name].append(math.log(predicted[name] / seconds))
    common = statistics.median(whole)
    pace = {name: math.exp(statistics.median(each or [common])) for name, each in logs.items()}
    return _with_pace(device, engine, pace)


def _with_pace(device: Device, engine: Engine, pace: Mapping[str, float]) -> Device:
    """The device with the speed of each term multiplied."""
    own = engine.for_device(device)
    products = own.gemm.efficiency if own.gemm.fp32_efficiency is None else own.gemm.fp32_efficiency
    constants = {
        "gemm.efficiency": min(1.0, own.gemm.efficiency * pace["products"]),
        "gemm.fp32_efficiency": min(1.0, products * pace["products"]),
        "attention.efficiency": min(1.0, own.attention.efficiency * pace["attention"]),
        "elementwise.passes": own.elementwise.passes / pace["elementwise"],
        "host.layer_overhead": own.host.layer_overhead / pace["host_gaps"],
    }
    near, rate = device.intra_node, pace["communication"]
    rows = tuple(
        row.model_copy(update={"bus_bandwidth": row.bus_bandwidth * rate, "latency": row.latency / rate})
        for row in device.collectives
    )
    link = near.model_copy(update={"bandwidth": near.bandwidth * rate, "latency": near.latency / rate})
    device = device.model_copy(update={"intra_node": link, "collectives": rows})
    return with_constants(device, engine, constants)


def ratios(steps: Sequence[StepTime], device: Device, engine: Engine, ranks: int) -> list[float]:
    """Predicted over measured time of each of `steps`, in their order."""
    return [
        float(prices(batch, device, engine, ranks).step_time_s[0] / batch.seconds[0])
        for step in steps
        for batch in batches_of([step])
    ]


def _is_of(run: PastRun, torch: str) -> bool:
    """Return whether a run used the bundled engine and a given release of PyTorch, of any build."""
    theirs = run.software.get("torch", "").partition("+")[0]
    return run.engine == DEFAULT_ENGINE and theirs == torch.partition("+")[0]
