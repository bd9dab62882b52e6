"""Real memory of one rank of big jobs, on one GPU: against the dry run, and against the plan.

python -m benchmarks.memory_gpu [--json] [--only TEXT]

Each rank trains for real: its kernels, its allocator. Other ranks do not exist (PyTorch's process group
"fake"), so that collectives take no time and do not change their buffers. Sizes must not depend on these, so
layouts with expert parallelism, which exchange sizes in buffers, are left out. Each trace and each
measurement has a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from costmodels.errors import InputError
from costmodels.spec.record import GIB
from planner import Plan, search
from planner.options.flags import run

HEAD_ROOM = 0.9
"""Largest share of the GPU's memory for a traced peak; driver and allocator need the rest."""


@dataclass(frozen=True)
class Case:
    """One rank of one job."""

    model: str
    world_size: int
    batch: int
    pins: tuple[str, ...]
    pipeline_rank: int = 0

    @property
    def forms(self) -> Sequence[bool]:
        """Forms of the layers, True for compiled ones; schedules that split backward never compile."""
        return (False,) if "schedule=zbv" in self.pins else (True, False)


CASES = (
    Case("gpt2-xl", 8, 64, ("dp=8", "zero=1", "mbs=4", "recompute=none")),
    Case("gpt2-xl", 8, 64, ("dp=8", "zero=3", "mbs=8", "recompute=selective")),
    Case("llama3-8b", 64, 128, ("dp=64", "zero=3", "mbs=1", "recompute=full")),
    Case("llama3-8b", 64, 128, ("tp=4", "dp=16", "zero=1", "mbs=1", "recompute=none")),
    Case("llama3-8b", 64, 128, ("tp=4", "dp=16", "zero=2", "zero_replicas=4", "mbs=1", "recompute=none")),
    Case("llama3-8b", 32, 64, ("tp=4", "pp=4", "vpp=1", "dp=2", "zero=1", "mbs=1", "recompute=none"), 3),
    Case("llama3-70b", 256, 256, ("tp=8", "pp=8", "vpp=1", "dp=4", "zero=1", "mbs=1", "recompute=none")),
    Case("llama3-70b", 256, 256, ("tp=8", "pp=8", "vpp=1", "dp=4", "zero=1", "mbs=1", "recompute=full"), 7),
    Case(
        "llama3-70b",
        256,
        256,
        ("tp=8", "pp=8", "vpp=2", "schedule=zbv", "dp=4", "zero=1", "mbs=1", "recompute=none"),
    ),
    Case(
        "llama3-70b", 256, 128, ("tp=8", "pp=8", "vpp=1", "cp=2", "cp_form=all_gather", "zero=1", "mbs=1"), 4
    ),
    Case("mixtral-8x7b", 64, 64, ("tp=4", "pp=4", "vpp=1", "ep=1", "etp=4", "zero=1", "mbs=1")),
)
"""Dense and sparse models, every stage of ZeRO, recomputation, pipelines and context parallelism."""


def planned(case: Case, device: str) -> Plan:
    """The plan of a case, with its estimate; `InputError` if no layout satisfies the pins."""
    result = search(
        case.model,
        world_size=case.world_size,
        device=device,
        global_batch_size=case.batch,
        pin=list(case.pins),
    )
    return result.plans(1)[0] if result.feasible else result.closest(1)[0]


def compare(case: Case, device: str, compiled: bool, room: float) -> dict[str, Any]:
    """Peaks of a case in bytes: traced and planned with the libraries' workspaces, and measured if it fits on
    the GPU. Measured are tensors (allocated) and the memory that the allocator holds (reserved).

    Args:
        room: bytes of the GPU.
    """
    plan = planned(case, device)
    memory = plan.estimate.memory[case.pipeline_rank]
    traced = in_process(plan, case, compiled, "traced")["allocated"]
    traced += round(plan.engine.for_device(plan.cluster.device).allocator.workspace_bytes)
    row: dict[str, Any] = {
        "model": case.model,
        "layout": plan.layout.describe(),
        "pipeline_rank": case.pipeline_rank,
        "compiled": compiled,
        "traced": traced,
        "planned": None,
        "planned_reserved": None,
        "allocated": None,
        "reserved": None,
    }
    if compiled or len(case.forms) == 1:
        # Plans are of compiled layers wherever these can be.
        row |= {"planned": memory.allocated, "planned_reserved": memory.reserved}
    if traced < HEAD_ROOM * room:
        row |= in_process(plan, case, compiled, "measured")
    return row


def in_process(plan: Plan, case: Case, compiled: bool, what: Literal["traced", "measured"]) -> dict[str, int]:
    """Bytes of a case in a separate process:

    `allocated` and, if measured, `reserved`. The process is separate because a dry run hides Triton from
    PyTorch in its process, and so that the allocator begins empty.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan.save(file)
        done = subprocess.run(case_command(file, case, compiled, what), capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{plan.model.name} {plan.layout.describe()} could not be {what}: {said[-1]}")
    found: dict[str, int] = json.loads(lines[-1])
    return found


def case_command(plan: Path, case: Case, compiled: bool, what: str) -> list[str]:
    """The command that traces or measures a plan; the last line that it prints is JSON."""
    form = "compiled" if compiled else "eager"
    return [
        sys.executable,
        "-m",
        "benchmarks.memory_gpu_case",
        str(plan),
        str(case.pipeline_rank),
        form,
        what,
    ]


def memory_gpu(
    only: Annotated[str, typer.Option(help="Run the cases whose model or layout has this in it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare real peaks of one GPU with the dry run and the plan."""
    import torch

    cases = [case for case in CASES if only in case.model or any(only in pin for pin in case.pins)]
    if not cases:
        raise InputError(f"--only {only}: no case has it; models are {', '.join({c.model for c in CASES})}")
    if not torch.cuda.is_available():
        print("benchmarks.memory_gpu: this machine has no GPU, so nothing is measured; run it on one")
        return
    from runtime.job.devices import detect_device

    device, room = detect_device(1).name, torch.cuda.get_device_properties(0).total_memory
    rows = []
    for case, compiled in [(one, form) for one in cases for form in one.forms]:
        rows.append(compare(case, device, compiled, room))
        if not as_json:
            print(line(rows[-1]), flush=True)
    if as_json:
        print(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=2))
        return
    seen = [row for row in rows if row["allocated"]]
    if seen:
        worst = [
            max((abs(row[name] / row["allocated"] - 1) for row in seen if row[name]), default=0.0)
            for name in ("traced", "planned")
        ]
        print(f"{len(seen)} measured on {device}; at most off: dry run {worst[0]:.1%}, plan {worst[1]:.1%}")


def line(row: dict[str, Any]) -> str:
    """One case as text: GiB, and the errors of trace and plan against what was measured."""
    name = f"{row['model']} {row['layout']} pp={row['pipeline_rank']} "
    name += "compiled" if row["compiled"] else "eager"
    parts = [f"traced {row['traced'] / GIB:.2f}"]
    if row["planned"]:
        reserved = row["planned_reserved"] / GIB
        parts.append(f"planned {row['planned'] / GIB:.2f}, reserved {reserved:.2f}")
    if row["allocated"] is None:
        return f"{name}: {'; '.join(parts)} GiB; not measured, too large for this GPU"
    parts.append(f"measured: allocated {row['allocated'] / GIB:.2f}, reserved {row['reserved'] / GIB:.2f}")
    errors = [
        f"{title} {row[key] / row['allocated'] - 1:+.1%}"
        for title, key in (("dry run", "traced"), ("plan", "planned"))
        if row[key]
    ]
    return f"{name}: {'; '.join(parts)} GiB; {', '.join(errors)}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(memory_gpu)
    run(app, "benchmarks.memory_gpu")
