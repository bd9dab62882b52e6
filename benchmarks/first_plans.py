"""Does the dry run agree that the planner's first plans fit? Random jobs, planned and traced.

python -m benchmarks.first_plans [--plans N] [--seed S] [--processes N] [--json]

Each job is a model of the catalogue, a number of devices of one kind, and a batch. Of its first plan the
pipeline ranks that may be the fullest are traced, with compiled layers where the runtime compiles: the one
that the estimate says is fullest, the first and the last. A plan is refused when the tensors of a rank, with
what the plan adds for the driver, the communicators and the allocator, are more than the device has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from costmodels.catalogue.local_machine import available_cores
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from planner import search
from planner.plan import Plan
from runtime.dryrun.memory_trace import CATEGORIES

MODELS = (
    *("gpt2-xl", "gpt3-1.3b", "gpt3-6.7b", "gpt3-13b", "gpt-22b", "gpt3-175b", "llama2-7b", "llama2-13b"),
    *("llama2-70b", "llama3-8b", "llama3-70b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-32b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b"),
)

DEVICES = ("v100-32g", "a100-40g", "a100-80g", "h100", "h200", "b200", "mi300x", "l40s")

FAR = 0.01
"""Estimates of memory this far off are listed."""

WORLD_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Asked:
    """A job to plan."""

    model: str
    device: str
    world_size: int
    batch: int
    maximum: bool
    """The batch may be smaller."""


@dataclass(frozen=True)
class Checked:
    """A first plan and its dry run, in bytes."""

    job: Asked
    layout: str
    rank: int
    """The pipeline rank that needs most."""
    traced: float
    """Tensors at its peak."""
    planned: float
    """The same by the estimate."""
    needed: float
    """With what the device needs besides."""
    memory: float
    """Of a device."""

    @property
    def refused(self) -> bool:
        """It does not fit."""
        return self.needed > self.memory

    def describe(self) -> str:
        """In one line."""
        job = f"{self.job.model} on {self.job.world_size} {self.job.device}, batch {self.job.batch}"
        sizes = f"{self.needed / GIB:.2f} of {self.memory / GIB:.2f} GiB"
        ratio = f"tensors planned over traced {self.planned / self.traced:.3f}"
        return f"{job}: {self.layout}: rank {self.rank} needs {sizes}; {ratio}"


def jobs(seed: int) -> Iterator[Asked]:
    """Random jobs without end."""
    chosen = random.Random(seed)
    while True:
        world_size = chosen.choice(WORLD_SIZES)
        yield Asked(
            model=chosen.choice(MODELS),
            device=chosen.choice(DEVICES),
            world_size=world_size,
            batch=world_size * chosen.choice((1, 2, 4, 8)),
            maximum=chosen.random() < 0.5,
        )


def first_plan(job: Asked) -> Plan | None:
    """The plan that is proposed; None where nothing fits or the device cannot run the model."""
    size = {"max_global_batch_size" if job.maximum else "global_batch_size": job.batch}
    try:
        result = search(job.model, world_size=job.world_size, device=job.device, **size)  # type: ignore[arg-type]
    except InputError:
        return None
    return result.plan(0) if result.feasible else None


def check(planned: tuple[Asked, Plan]) -> Checked:
    """Trace what of a job's plan may be fullest."""
    from runtime.dryrun.run import trace
    from runtime.settings.options import TrainingOptions

    job, plan = planned
    layout, memory = plan.layout, plan.estimate.memory
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total)
    compiled = TrainingOptions().compiles(layout, on_gpu=True)
    found = []
    for stage in sorted({0, fullest, layout.pipeline_parallel - 1}):
        traced = trace(plan.model, layout, pipeline_rank=stage, compiled=compiled).peak.total
        estimated = sum(getattr(memory[stage], kind) for kind in CATEGORIES)
        found.append((traced + memory[stage].overhead, stage, traced, estimated))
    needed, stage, traced, estimated = max(found)
    return Checked(job, layout.describe(), stage, traced, estimated, needed, plan.cluster.memory_bytes)


def main() -> None:
    """Print what is refused and how far estimates are off."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_plans", description=str(__doc__).split("\n")[0])
    parser.add_argument("--plans", type=int, default=200, help="first plans to check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    started = time.perf_counter()
    drawn = jobs(given.seed)
    planned: list[tuple[Asked, Plan]] = []
    without = 0
    while len(planned) < given.plans:
        job = next(drawn)
        plan = first_plan(job)
        without += plan is None
        if plan is not None:
            planned.append((job, plan))
    # A trace leaves PyTorch's compiler full of graphs: a process is renewed after some.
    with get_context("spawn").Pool(given.processes, maxtasksperchild=20) as pool:
        checked = []
        for one in pool.imap(check, planned):
            checked.append(one)
            refused = sum(other.refused for other in checked)
            print(f"{len(checked)} of {len(planned)} traced, {refused} refused", file=sys.stderr, flush=True)
    report(checked, without, time.perf_counter() - started, given.json)


def report(checked: list[Checked], without: int, seconds: float, as_json: bool) -> None:
    """Print the outcome."""
    ratios = [one.planned / one.traced for one in checked]
    refused = [one for one in checked if one.refused]
    if as_json:
        rows: list[dict[str, Any]] = [asdict(one) | {"refused": one.refused} for one in checked]
        print(json.dumps({"refused": len(refused), "without": without, "plans": rows}, indent=2))
        return
    print(f"{len(checked)} first plans in {seconds:.0f} s; {without} further jobs have none")
    print(f"{len(refused)} refused by the dry run")
    for one in refused:
        print(f"  {one.describe()}")
    tenths = statistics.quantiles(ratios, n=10)
    print(
        f"tensors planned over traced: median {statistics.median(ratios):.3f}, "
        f"80 % within {tenths[0]:.3f} and {tenths[-1]:.3f}, extremes {min(ratios):.3f} and {max(ratios):.3f}"
    )
    far = [one for one in checked if abs(one.planned / one.traced - 1) > FAR]
    print(f"{len(far)} estimates off by more than {FAR:.0%}")
    for one in sorted(far, key=lambda one: one.planned / one.traced):
        print(f"  {one.describe()}")


if __name__ == "__main__":
    main()
