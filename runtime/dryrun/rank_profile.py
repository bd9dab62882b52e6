"""Seconds of one rank of any job by part, measured on one device and compared with the plan's."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from costmodels.catalogue.local_machine import available_cores, available_memory
from costmodels.errors import InputError
from costmodels.pricing import estimate as estimate_layout
from costmodels.rank_costs import RankCosts
from costmodels.spec.hardware import Device
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from planner.history.step_parts import StepParts
from planner.plan import Plan
from runtime.dryrun.real_rank import real_rank
from runtime.dryrun.requirements import ranks_to_trace
from runtime.dryrun.steady import fewest_micro_batches
from runtime.job.devices import detect_device, local_device_count
from runtime.parallel.accelerator import accelerator_type, device_module, is_accelerator
from runtime.profiling.parts import step_parts
from runtime.profiling.window import profiled, profiled_step
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer

TIMED = 3
"""Number of timed steps, whose median counts, after one warm-up step."""

OWN = ("products", "attention", "elementwise", "optimizer", "host_gaps")
"""Terms of a rank's own work; the others belong to the network."""

LINKS = ("intra_node", "inter_node", "island", "nics_per_node")
"""Fields of a cluster that default to the device's values if None."""

NETWORK = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "bubble",
    "data_parallel",
)
"""Parts of `StepTime` that come from the network model, as no other rank exists."""


@dataclass(frozen=True)
class RankProfile:
    """A step of one rank, in seconds."""

    rank: int
    pipeline_rank: int
    device: str
    """The device that ran the step."""
    plan_device: str
    """The device of the plan: the same one, or one that the measured device replaces."""
    compiled: bool
    micro_batches: tuple[int, ...]
    """Numbers of microbatches with which the step was measured."""
    measured: dict[str, float]
    """Measured seconds of the whole step, by the name in `OWN`."""
    predicted: dict[str, float]
    """Predicted seconds of the whole step for this rank on the device that ran it, by the name in `OWN`."""
    plan_predicted: dict[str, float]
    """Predicted seconds on the plan's device, by the name in `OWN`."""
    network: dict[str, float]
    """Seconds that the plan adds for communication and the bubble, by the name in `NETWORK`."""

    @property
    def step_s(self) -> float:
        """Seconds of the step: the measured parts and the predicted network parts."""
        return sum(self.measured.values()) + sum(self.network.values())

    @property
    def plan_measured(self) -> dict[str, float]:
        """Seconds on the plan's device by the name in `OWN`: measured seconds times the ratio of
        predictions."""
        ratios = {
            name: self.plan_predicted[name] / seconds if seconds else 1.0
            for name, seconds in self.predicted.items()
        }
        return {name: seconds * ratios[name] for name, seconds in self.measured.items()}

    @property
    def plan_step_s(self) -> float:
        """Seconds of the step on the plan's device."""
        return sum(self.plan_measured.values()) + sum(self.network.values())

    def as_json(self) -> dict[str, Any]:
        """The profile as a record for JSON."""
        return {
            **vars(self),
            "micro_batches": list(self.micro_batches),
            "step_s": self.step_s,
            "plan_measured": self.plan_measured,
            "plan_step_s": self.plan_step_s,
            "predicted_step_s": sum(self.predicted.values()) + sum(self.network.values()),
        }


def profile_rank(plan: Plan, rank: int) -> RankProfile:
    """Run a rank of a plan on a real device and time it.

    Two steps, with the fewest microbatches of the schedule and with twice as many, give the seconds of a
    microbatch and of the rest of a step. On a CPU, seconds are multiplied by the ranks that share a core.

    Raises:
        InputError: this machine lacks the device or the memory, or the plan has no such rank.
    """
    layout = plan.layout
    ranks_to_trace(layout, None, rank)
    pipeline_rank = rank // (layout.world_size // layout.pipeline_parallel)
    device, here = _device(plan, pipeline_rank)
    counts = _micro_batches(layout)
    short = layout.model_copy(
        update={"global_batch_size": counts[-1] * layout.micro_batch_size * layout.data_parallel}
    )
    options = TrainingOptions()
    threads, sharers = torch.get_num_threads(), 1.0
    if device.type == "cpu":
        # The rank has its share of the cores; numbers without meaning must not slow it down.
        ranks, cores = min(plan.cluster.devices_per_node, layout.world_size), available_cores()
        sharers = max(1.0, ranks / cores)
        torch.set_num_threads(max(1, cores // ranks))
        torch.set_flush_denormal(True)
    try:
        with real_rank(plan.model, short, rank, options, device) as trainer:
            found = [_step(trainer, count, device).scaled(sharers) for count in counts]
    except torch.OutOfMemoryError as error:
        raise InputError(f"rank {rank} runs out of memory on {device}: {str(error).split('. ')[0]}") from None
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    return RankProfile(
        rank,
        pipeline_rank,
        here.name,
        plan.cluster.device.name,
        options.compiles(layout, device.type == "cuda"),
        counts,
        whole_step(dict(zip(counts, found, strict=True)), layout.micro_batches),
        rank_prediction(plan_on(plan, here), pipeline_rank),
        rank_prediction(plan, pipeline_rank),
        {name: getattr(plan.estimate.time, name) for name in NETWORK},
    )


def _micro_batches(layout: Layout) -> tuple[int, ...]:
    """Microbatches of the steps to time: the fewest that the schedule runs, and twice as many."""
    fewest = fewest_micro_batches(layout)
    return tuple(sorted({fewest, min(2 * fewest, layout.micro_batches)}))


def stands_in(here: Device, plan: Plan) -> bool:
    """True if a device can replace the plan's device: same maker and kind, and it supports the plan's number
    format."""
    meant = plan.cluster.device
    alike = (here.vendor, here.kind) == (meant.vendor, meant.kind) and meant.kind != "cpu"
    return here.name == meant.name or (alike and plan.layout.precision in here.peak_flops)


def plan_on(plan: Plan, here: Device) -> Plan:
    """The plan priced on other devices with its own links."""
    meant = plan.cluster.device
    if here.name == meant.name:
        return plan
    links = {name: getattr(plan.cluster, name) or getattr(meant, name) for name in LINKS}
    moved = {"device": here, "memory_bytes": here.memory_bytes, **links}
    cluster = plan.cluster.model_copy(update=moved)
    estimate = estimate_layout(plan.model, cluster, plan.engine, plan.layout)
    return plan.model_copy(update={"cluster": cluster, "estimate": estimate})


def _device(plan: Plan, pipeline_rank: int) -> tuple[torch.device, Device]:
    """This machine's device to run a rank of a plan; raises `InputError` where it cannot."""
    here = plan.cluster.device
    if plan.cluster.parts:
        raise InputError("planner profile runs on one device, and the plan is for nodes of two kinds")
    if here.kind == "cpu":
        room: float = available_memory()
        device = torch.device("cpu")
    else:
        if not local_device_count():
            raise InputError(
                f"the plan is for {here.name}, and this machine has no such device; run planner profile "
                "where it is, or plan for --device cpu"
            )
        name, here = here.name, detect_device(1)
        if not stands_in(here, plan):
            raise InputError(
                f"the plan is for {name} in {plan.layout.precision}, and {here.name} of this machine cannot "
                f"stand in for it; plan for --device {here.name}"
            )
        room, device = here.memory_bytes, torch.device(accelerator_type() or "cuda", 0)
    needed = plan.estimate.memory[pipeline_rank].total
    if needed > room:
        raise InputError(
            f"pipeline rank {pipeline_rank} of the plan needs {needed / GIB:.1f} GiB, and this machine has "
            f"{room / GIB:.1f}; name another --rank, or a plan of smaller shares"
        )
    return device, here


def _step(trainer: Trainer, micro_batches: int, device: torch.device) -> StepParts:
    """The profiled parts of a step with a number of microbatches, scaled to the median of unprofiled
    steps."""
    rows = micro_batches * trainer.layout.micro_batch_size
    samples = np.zeros((rows, trainer.spec.seq + 1), dtype=np.int64)
    seconds = []
    for _ in range(1 + TIMED):
        since = time.perf_counter()
        trainer.train_step(samples)
        if is_accelerator(device):
            device_module(device).synchronize(device)
        seconds.append(time.perf_counter() - since)
    with profiled(device) as events, profiled_step(trainer.optimizer, device):
        trainer.train_step(samples)
    parts = step_parts(events)
    if parts is None or not parts.total:
        raise InputError(f"PyTorch's profiler saw nothing of a step on {device}")
    return parts.scaled(statistics.median(seconds[1:]) / parts.total)


def whole_step(measured: dict[int, StepParts], micro_batches: int) -> dict[str, float]:
    """Seconds of a step with a number of microbatches by the name in `OWN`, from steps with fewer.

    Collectives do nothing here; the host's time to call them counts as host time.
    """
    found = {}
    counts = sorted(measured)
    few, many = counts[0], counts[-1]
    for name in OWN:
        first, last = (_own(measured[count], name) for count in (few, many))
        each = (last - first) / (many - few) if many > few else 0.0
        # Noise may let a part shrink, or a step of none be less than nothing.
        each = min(max(each, 0.0), first / few)
        found[name] = first + each * (micro_batches - few)
    return found


def _own(parts: StepParts, name: str) -> float:
    seconds: float = getattr(parts, name)
    return seconds + parts.communication if name == "host_gaps" else seconds


def rank_prediction(plan: Plan, pipeline_rank: int) -> dict[str, float]:
    """Seconds that the plan's model predicts for a pipeline rank's own step, by the name in `OWN`."""
    costs = RankCosts.of_all(
        plan.model,
        plan.cluster,
        plan.engine.for_device(plan.cluster.device),
        LayoutTable.of([plan.layout]),
        0,
    )
    here = costs.at((np.array([0]), np.array([pipeline_rank])))
    count = plan.layout.micro_batches
    part = {
        name: count * float(here.part(name)[0])
        for name in ("compute", "attention", "elementwise", "recompute", "launch", "offload")
    }
    layers = part["compute"] + part["attention"] + part["elementwise"]
    again = 1.0 + (part["recompute"] / layers if layers else 0.0)
    time_of_plan = plan.estimate.time
    return {
        "products": again * part["compute"],
        "attention": again * part["attention"],
        "elementwise": again * part["elementwise"] + time_of_plan.accumulation,
        "optimizer": time_of_plan.optimizer,
        "host_gaps": part["launch"] + part["offload"],
    }
