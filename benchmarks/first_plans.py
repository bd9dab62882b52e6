"""Checks by dry runs whether the planner's first plans fit, for random jobs.

python -m benchmarks.first_plans [--plans N] [--seed S] [--processes N] [--json]

Each job is a model of the catalogue, a number of devices of one kind, and a batch. For its first plan three
pipeline ranks are traced: the fullest one by the estimate, the first and the last.

Layers are compiled as in the runtime. A plan is refused if a rank needs more bytes than the device has, for
its tensors, the driver, the communicators and the allocator. Plans that the search rejected for their memory
are traced too, to find rejections by mistake. The search is repeated with `MORE` of the memory. Its `SHOWN`
fastest plans are candidates if the estimates say that they do not fit and if they are more than `SLOWER`
faster than the fastest plan that fits. At most `--rivals` of a job are traced, the fastest first.
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
from planner.ranking.result import SearchResult
from runtime.dryrun.memory_trace import CATEGORIES

MODELS = (
    *("gpt2-xl", "gpt3-1.3b", "gpt3-6.7b", "gpt3-13b", "gpt-22b", "gpt3-175b", "llama2-7b", "llama2-13b"),
    *("llama2-70b", "llama3-8b", "llama3-70b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-32b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b"),
)

DEVICES = ("v100-32g", "a100-40g", "a100-80g", "h100", "h200", "b200", "mi300x", "l40s")

FAR = 0.01
"""Smallest relative error with which an estimate of memory is listed."""

MORE = 1.06
"""Memory of the devices, relative to their real memory, in the search for rivals."""

SHOWN = 50
"""Number of plans among which rivals are searched."""

SLOWER = 0.01
"""Least relative lead of a rival over the fastest plan that fits."""

WORLD_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Asked:
    """A job to plan."""

    model: str
    device: str
    world_size: int
    batch: int
    maximum: bool
    """True if the batch may be smaller."""


@dataclass(frozen=True)
class Checked:
    """A first plan and its dry run, in bytes."""

    job: Asked
    layout: str
    rank: int
    """The pipeline rank that needs most memory."""
    traced: float
    """Tensors at its peak."""
    planned: float
    """Tensors at the peak by the estimate."""
    needed: float
    """Bytes that the device must have: the traced tensors, driver, communicators and allocator."""
    memory: float
    """Bytes of a device."""
    tokens_per_s: float

    @property
    def refused(self) -> bool:
        """True if the plan does not fit by its dry run."""
        return self.needed > self.memory

    def describe(self) -> str:
        """The result in one line."""
        job = f"{self.job.model} on {self.job.world_size} {self.job.device}, batch {self.job.batch}"
        sizes = f"{self.needed / GIB:.2f} of {self.memory / GIB:.2f} GiB"
        ratio = f"tensors planned over traced {self.planned / self.traced:.3f}"
        return f"{job}: {self.layout}: rank {self.rank} needs {sizes}; {ratio}"


def jobs(seed: int) -> Iterator[Asked]:
    """Endless random jobs."""
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


def first_plan(job: Asked, **others: Any) -> Plan | None:
    """The proposed plan; None if nothing fits or the device cannot run the model."""
    result = searched(job, **others)
    return result.plan(0) if result is not None and result.feasible else None


def searched(job: Asked, **others: Any) -> SearchResult | None:
    """The answer to a job; None if the device cannot run the model."""
    size: dict[str, Any] = {"max_global_batch_size" if job.maximum else "global_batch_size": job.batch}
    try:
        return search(job.model, world_size=job.world_size, device=job.device, **size, **others)
    except InputError:
        return None


def rivals(job: Asked, plan: Plan, most: int) -> list[Plan]:
    """Faster plans that were rejected because they lack little memory, the fastest first."""
    fastest = first_plan(job, prefer="fastest")
    memory = plan.cluster.memory_bytes
    more = searched(job, prefer="fastest", device_memory_gib=MORE * memory / GIB, memory_margin_gib=0)
    if not most or more is None or fastest is None:
        return []
    found = []
    for other in more.plans(SHOWN):
        if other.estimate.tokens_per_s <= (1 + SLOWER) * fastest.estimate.tokens_per_s:
            break
        if other.estimate.peak_memory_bytes > memory:
            found.append(other.model_copy(update={"cluster": plan.cluster}))
    return found[:most]


def check(planned: tuple[Asked, Plan, int]) -> tuple[Checked, list[Checked]]:
    """Trace the ranks of a job's plan that may be fullest, and its rivals until one fits."""
    job, plan, most = planned
    first, others = traced_plan(job, plan), []
    for rival in rivals(job, plan, most):
        others.append(traced_plan(job, rival))
        if not others[-1].refused:
            break
    return first, others


def traced_plan(job: Asked, plan: Plan) -> Checked:
    """The dry run of a plan."""
    from runtime.dryrun.run import trace
    from runtime.settings.training_options import TrainingOptions

    layout, memory = plan.layout, plan.estimate.memory
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total)
    compiled = TrainingOptions().compiles(layout, on_gpu=True)
    found = []
    for stage in sorted({0, fullest, layout.pipeline_parallel - 1}):
        traced = trace(plan.model, layout, pipeline_rank=stage, compiled=compiled).peak.total
        estimated = sum(getattr(memory[stage], kind) for kind in CATEGORIES)
        found.append((traced + memory[stage].overhead, stage, traced, estimated))
    needed, stage, traced, estimated = max(found)
    return Checked(
        *(job, layout.describe(), stage, traced, estimated, needed, plan.cluster.memory_bytes),
        plan.estimate.tokens_per_s,
    )


def main() -> None:
    """Print refused plans and errors of estimates."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_plans", description=str(__doc__).split("\n")[0])
    parser.add_argument("--plans", type=int, default=200, help="first plans to check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rivals", type=int, default=0, help="faster plans of a job that are traced, at most"
    )
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    started = time.perf_counter()
    drawn = jobs(given.seed)
    planned: list[tuple[Asked, Plan, int]] = []
    without = 0
    while len(planned) < given.plans:
        job = next(drawn)
        plan = first_plan(job)
        without += plan is None
        if plan is not None:
            planned.append((job, plan, given.rivals))
    # A trace leaves PyTorch's compiler full of graphs: a process is renewed after some.
    with get_context("spawn").Pool(given.processes, maxtasksperchild=20) as pool:
        checked, others = [], []
        for one, its in pool.imap(check, planned):
            checked.append(one)
            others.append(its)
            refused = sum(other.refused for other in checked)
            print(f"{len(checked)} of {len(planned)} traced, {refused} refused", file=sys.stderr, flush=True)
    report(checked, others, without, time.perf_counter() - started, given.json)


def report(
    checked: list[Checked], others: list[list[Checked]], without: int, seconds: float, as_json: bool
) -> None:
    """Print the outcome.

    Args:
        others: the rivals of each plan that were traced; only the last of them may fit.
        without: number of jobs without a plan.
    """
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
    traced = sum(map(len, others))
    overlooked = [its[-1] for its in others if its and not its[-1].refused]
    if traced:
        print(f"{traced} rivals traced; {len(overlooked)} jobs have one that fits and is faster")
    for one in overlooked:
        print(f"  {one.describe()}; {one.tokens_per_s:,.0f} tokens/s")
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
