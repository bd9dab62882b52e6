"""Real memory of one rank of big jobs, on one GPU: against the dry run, and against the planner's formula.

python -m benchmarks.memory_gpu [--json] [--only TEXT]

Each rank trains for real: its kernels, its allocator. Other ranks do not exist (PyTorch's process group
"fake"), so that collectives take no time and leave in their buffers what was there; no size depends on it.
Layouts that spread experts over ranks are left out: there the content of buffers would be sizes.
"""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from costmodels.errors import InputError
from costmodels.words import GIB
from planner import Plan, search
from planner.flags import run
from runtime.memory_trace import CATEGORIES

STEPS = 3
"""Steps of the real run; the peak is that of the last one."""

HEAD_ROOM = 0.9
"""Share of the GPU's memory that a traced peak may take: the rest is the driver's and the allocator's."""


@dataclass(frozen=True)
class Case:
    """One rank of one job."""

    model: str
    world_size: int
    batch: int
    pins: tuple[str, ...]
    pipeline_rank: int = 0
    compiled: bool = True


CASES = (
    Case("gpt2-xl", 8, 64, ("dp=8", "zero=1", "mbs=4", "recompute=none")),
    Case("gpt2-xl", 8, 64, ("dp=8", "zero=1", "mbs=4", "recompute=none"), compiled=False),
    Case("gpt2-xl", 8, 64, ("dp=8", "zero=3", "mbs=8", "recompute=selective"), compiled=False),
    Case("llama3-8b", 64, 128, ("dp=64", "zero=3", "mbs=1", "recompute=full")),
    Case("llama3-8b", 64, 128, ("dp=64", "zero=3", "mbs=1", "recompute=full"), compiled=False),
    Case("llama3-8b", 64, 128, ("tp=4", "dp=16", "zero=1", "mbs=1", "recompute=none")),
    Case("llama3-8b", 64, 128, ("tp=4", "dp=16", "zero=1", "mbs=1", "recompute=none"), compiled=False),
    Case("llama3-8b", 64, 128, ("tp=4", "dp=16", "zero=2", "zero_replicas=4", "mbs=1", "recompute=none")),
    Case("llama3-8b", 32, 64, ("tp=4", "pp=4", "vpp=1", "dp=2", "zero=1", "mbs=1", "recompute=none"), 3),
    Case("llama3-70b", 256, 256, ("tp=8", "pp=8", "vpp=1", "dp=4", "zero=1", "mbs=1", "recompute=none")),
    Case("llama3-70b", 256, 256, ("tp=8", "pp=8", "vpp=1", "dp=4", "zero=1", "mbs=1", "recompute=full"), 7),
    Case(
        "llama3-70b",
        256,
        256,
        ("tp=8", "pp=8", "vpp=2", "schedule=zbv", "dp=4", "zero=1", "mbs=1", "recompute=none"),
        compiled=False,
    ),
    Case(
        "llama3-70b", 256, 128, ("tp=8", "pp=8", "vpp=1", "cp=2", "cp_form=all_gather", "zero=1", "mbs=1"), 4
    ),
    Case("mixtral-8x7b", 64, 64, ("tp=4", "pp=4", "vpp=1", "ep=1", "etp=4", "zero=1", "mbs=1")),
    Case(
        "mixtral-8x7b", 64, 64, ("tp=4", "pp=4", "vpp=1", "ep=1", "etp=4", "zero=1", "mbs=1"), compiled=False
    ),
)
"""Dense and sparse models, every stage of ZeRO, recomputation, pipelines and context parallelism."""


def planned(case: Case, device: str) -> Plan:
    """The plan of a case, with its estimate; `InputError` where no layout is as pinned."""
    result = search(
        case.model,
        world_size=case.world_size,
        device=device,
        global_batch_size=case.batch,
        pin=list(case.pins),
    )
    return result.plans(1)[0] if result.feasible else result.closest(1)[0]


def compare(case: Case, device: str) -> dict[str, Any]:
    """Peaks of a case in bytes: traced, estimated, and where the GPU has room for it measured."""
    import torch

    from runtime.dryrun import trace

    plan = planned(case, device)
    traced = trace(plan.model, plan.layout, pipeline_rank=case.pipeline_rank, compiled=case.compiled)
    memory = plan.estimate.memory[case.pipeline_rank]
    row: dict[str, Any] = {
        "model": case.model,
        "layout": plan.layout.describe(),
        "pipeline_rank": case.pipeline_rank,
        "compiled": case.compiled,
        "traced": traced.peak.total,
        "estimated": sum(getattr(memory, category) for category in CATEGORIES),
        "allocated": None,
        "reserved": None,
    }
    if traced.peak.total < HEAD_ROOM * torch.cuda.get_device_properties(0).total_memory:
        row |= measured(plan, case)
    return row


def measured(plan: Plan, case: Case) -> dict[str, int]:
    """Bytes that the allocator says it has handed out and reserved at most, in the last of a few steps."""
    import torch

    from runtime import stages
    from runtime.dryrun.run import alone, one_rank_of, shortened
    from runtime.options import TrainingOptions
    from runtime.trainer import Trainer

    layout = shortened(plan.layout, case.pipeline_rank)
    rank = case.pipeline_rank * (layout.world_size // layout.pipeline_parallel)
    options = TrainingOptions(compile=case.compiled, no_compile=not case.compiled)
    with ExitStack() as stack:
        stack.enter_context(one_rank_of(layout.world_size, rank))
        stack.enter_context(alone())
        # Drawing weights on the host takes minutes, and their values do not matter.
        stack.enter_context(patch.object(stages, "initialise", _zeros))
        trainer = Trainer(plan.model, layout, options, torch.device("cuda", 0))
        samples = np.zeros((len(trainer.rows), plan.model.seq + 1), dtype=np.int64)
        for _ in range(STEPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            trainer.train_step(samples)
        torch.cuda.synchronize()
        found = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        del trainer
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return found


def _zeros(model: Any, *_: Any) -> None:
    import torch

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()


def memory_gpu(
    only: Annotated[str, typer.Option(help="Run the cases whose model or layout has this in it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare real peaks of one GPU with the dry run and the formula."""
    import torch

    if not torch.cuda.is_available():
        raise InputError("benchmarks.memory_gpu measures a GPU, and this machine has none; run it on one")
    from runtime.devices import detect_device

    device = detect_device(1).name
    cases = [case for case in CASES if only in case.model or any(only in pin for pin in case.pins)]
    if not cases:
        raise InputError(f"--only {only}: no case has it; models are {', '.join({c.model for c in CASES})}")
    rows = []
    for case in cases:
        rows.append(compare(case, device))
        if not as_json:
            print(line(rows[-1]), flush=True)
    errors = [abs(row["traced"] / row["allocated"] - 1) for row in rows if row["allocated"]]
    if as_json:
        print(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=2))
    elif errors:
        print(f"{len(errors)} measured on {device}; dry run off by {100 * max(errors):.1f} % at most")


def line(row: dict[str, Any]) -> str:
    """One case as text: GiB, and the errors of trace and estimate against what was allocated."""
    name = f"{row['model']} {row['layout']} pp={row['pipeline_rank']} "
    name += "compiled" if row["compiled"] else "eager"
    sizes = f"traced {row['traced'] / GIB:.2f}, estimated {row['estimated'] / GIB:.2f}"
    if row["allocated"] is None:
        return f"{name}: {sizes} GiB; not measured, too large for this GPU"
    errors = [f"{100 * (row[key] / row['allocated'] - 1):+.1f} %" for key in ("traced", "estimated")]
    return (
        f"{name}: {sizes}, allocated {row['allocated'] / GIB:.2f}, reserved {row['reserved'] / GIB:.2f} GiB; "
        f"dry run {errors[0]}, formula {errors[1]}"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(memory_gpu)
    run(app, "benchmarks.memory_gpu")
