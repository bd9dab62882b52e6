"""Speed of one GPU beside compiled transformers, all rows in one go: `python -m benchmarks.gpu [--json]`.

Each row is a training step of a model, cut to the layers that fit, by two contestants, each in a process of
its own. These are the runtime, and plain PyTorch around the transformers library's model (whole-model
torch.compile, autocast to bf16, fused AdamW, the same batch). First the layers of all rows are compiled, at
the same time, which fills the compiler's caches. Then come the runtime's rows, the most important first; rows
that have not begun after `--minutes` are left out and listed. Without a GPU, all rows run on the CPU with
small shapes. Their speed has no meaning, but they show that the command works.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from benchmarks.gpu_kinds.attempts import reason
from costmodels import Layout, ModelSpec
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.record import GIB
from planner.options.flags import run
from runtime.processes.tether import tether
from runtime.settings.checks import check_job
from tests.support.layouts import parse_layout

RUNTIME, TRANSFORMERS = "runtime", "transformers"

WARM = "warm"
"""Name of an additional contestant: the runtime on a small part of the model, to fill the compiler's
caches."""

WARM_LAYERS, WARM_VOCAB, WARM_S = 2, 512, 120.0
"""Layers and vocabulary of the small part, and its time limit in seconds. A layer has the same graph."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    model: str
    layout: str
    fields: dict[str, int] = field(default_factory=dict)
    """Fields of the model that differ from the catalogue's."""
    target: float | None = None
    """The desired MFU."""
    times: tuple[str, float] | None = None
    """Another row, and the share of its speed that this row should reach."""


LLAMA = {"layers": 8, "seq": 8192}

CASES = (
    Case("llama3-8b", "llama3-8b", "mbs=1,gbs=8", LLAMA, target=0.58),
    Case("qwen3-30b-a3b", "qwen3-30b-a3b", "mbs=2,gbs=4", {"layers": 3, "seq": 4096}, target=0.35),
    Case("gpt2-medium", "gpt2-medium", "mbs=8,gbs=32", {"seq": 1024}, target=0.42),
    Case("llama3-8b fp8", "llama3-8b", "mbs=1,gbs=8,precision=fp8", LLAMA, times=("llama3-8b", 1.25)),
    Case("qwen3-0.6b", "qwen3-0.6b", "mbs=4,gbs=16", {"seq": 2048}, target=0.44),
    Case(
        "gpt2-medium graphs",
        "gpt2-medium",
        "mbs=8,gbs=32,cuda_graphs=1",
        {"seq": 1024},
        times=("gpt2-medium", 1.0),
    ),
    Case(
        "qwen3-0.6b graphs",
        "qwen3-0.6b",
        "mbs=4,gbs=16,cuda_graphs=1",
        {"seq": 2048},
        times=("qwen3-0.6b", 1.0),
    ),
    Case("gpt2-xl", "gpt2-xl", "mbs=8,gbs=16", {"seq": 1024}, target=0.45),
)
"""The rows, the most important first: five minutes hold the first four at least."""

BESIDE = 1.2
"""The multiple of transformers' speed that every row should reach."""

ROW_S = 180.0
"""Most seconds of a measurement."""

SMALL = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 512,
    "seq": 16,
}

SMALL_EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 32}
"""Fields of the small model that replaces a model with experts on the CPU."""


def sized(case: Case, on_gpu: bool) -> tuple[ModelSpec, Layout]:
    """Model and layout of a row, small ones without a GPU."""
    spec = load_model(case.model).model_copy(update=case.fields)
    if not on_gpu:
        small = SMALL | (SMALL_EXPERTS if spec.experts else {})
        if spec.kv_heads == spec.heads:
            small["kv_heads"] = small["heads"]
        spec = ModelSpec.model_validate(spec.model_dump() | small | {"max_positions": SMALL["seq"]})
    layout = parse_layout("precision=bf16," + case.layout, spec)
    check_job(spec, layout, 1)
    return spec, layout


def command(case: Case, contestant: str, compiled: bool) -> list[str]:
    """The command that measures one contestant of a row; the last line that it prints is JSON."""
    form = "compiled" if compiled else "eager"
    return [sys.executable, "-m", "benchmarks.gpu_case", case.name, contestant, form]


def measured(case: Case, contestant: str, compiled: bool) -> dict[str, Any]:
    """Seconds and bytes of one contestant; or `failed`, the line with the reason of its failure."""
    try:
        done = subprocess.run(
            tether(command(case, contestant, compiled)), capture_output=True, text=True, timeout=ROW_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {ROW_S:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": reason(done.stderr)}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compile_first(cases: list[Case]) -> None:
    """Compile the layers of all rows at the same time, each in a process of its own, and print the rows that
    failed."""
    # Layers of graphs are compiled as those of the same model without.
    running = {
        case.name: subprocess.Popen(
            tether(command(case, WARM, True)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for case in cases
        if "cuda_graphs" not in case.layout
    }
    ends = time.monotonic() + WARM_S
    for name, process in running.items():
        try:
            code = process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            print(f"{name}: its layers were not compiled ahead", file=sys.stderr)


def speed(case: Case, found: dict[str, Any], on_gpu: bool, peak_flops: float | None) -> dict[str, Any]:
    """Tokens a second and MFU of a measurement (relative to the bf16 peak, with causal attention)."""
    spec, layout = sized(case, on_gpu)
    rate = layout.global_batch_size / found["step_time_s"]
    return found | {
        "tokens_per_s": rate * spec.seq,
        "mfu": rate * flops_per_sequence(spec) / peak_flops if peak_flops else None,
    }


def gpu(
    only: Annotated[str, typer.Option(help="Run the rows whose name has this in it.")] = "",
    minutes: Annotated[float, typer.Option(help="Begin no measurement after so long.")] = 7.0,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile; on GPUs unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train every row on this machine's first device and report its speed."""
    cases = [case for case in CASES if only in case.name]
    if not cases:
        raise InputError(f"--only {only}: no row has it; rows are {', '.join(case.name for case in CASES)}")
    # Only rows in fp8 need torchao.
    in_fp8 = any(sized(case, on_gpu=False)[1].precision == "fp8" for case in cases)
    needed = (TRANSFORMERS, "torchao") if in_fp8 else (TRANSFORMERS,)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)}: not installed; run `pip install '.[benchmarks,fp8]'`")
    from runtime.job.devices import detect_device, local_device_count

    on_gpu, began = local_device_count() > 0, time.monotonic()
    forms = on_gpu if compiled is None else compiled
    device = detect_device(1)
    peak = device.peak_flops.get("bf16") if on_gpu else None
    rows: dict[str, dict[str, Any]] = {case.name: {"device": device.name} for case in cases}
    contests = [(case, RUNTIME) for case in cases]
    contests += [(case, TRANSFORMERS) for case in cases if case.times is None]
    if forms:
        compile_first(cases)
    for case, contestant in contests:
        if time.monotonic() - began > 60 * minutes:
            rows[case.name][contestant] = {"failed": f"not begun within {minutes:g} minutes"}
            continue
        found = measured(case, contestant, forms)
        rows[case.name][contestant] = found if "failed" in found else speed(case, found, on_gpu, peak)
        if not as_json:
            print(line(case, contestant, rows[case.name][contestant]), flush=True)
    for case in cases:
        rows[case.name] |= _ratios(case, rows)
    if as_json:
        print(json.dumps({"device": device.name, "on_gpu": on_gpu, "rows": rows}, indent=2))
        return
    for case in cases:
        print(summary(case, rows[case.name]))


def _ratios(case: Case, rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ratios of a row's speed to that of transformers, and to that of the other row in `times`."""
    own, found = rows[case.name].get(RUNTIME, {}), {}
    others = [("over_transformers", rows[case.name].get(TRANSFORMERS, {}))]
    if case.times is not None and case.times[0] in rows:
        others.append(("over_other_row", rows[case.times[0]].get(RUNTIME, {})))
    for name, other in others:
        if "tokens_per_s" in own and "tokens_per_s" in other:
            found[name] = own["tokens_per_s"] / other["tokens_per_s"]
    return found


def line(case: Case, contestant: str, found: dict[str, Any]) -> str:
    """One measurement as text."""
    if "failed" in found:
        return f"{case.name}, {contestant}: {found['failed']}"
    share = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%}"
    memory = found["peak_memory_bytes"] / GIB
    return f"{case.name}, {contestant}: {found['tokens_per_s']:,.0f} tokens/s{share}, {memory:.1f} GiB"


def summary(case: Case, row: dict[str, Any]) -> str:
    """Figures of the rows, beside the desired ones."""
    parts = []
    mfu = row.get(RUNTIME, {}).get("mfu")
    if case.target is not None and mfu is not None:
        parts.append(f"MFU {mfu:.1%} (aim {case.target:.0%})")
    if "over_transformers" in row:
        parts.append(f"{row['over_transformers']:.2f} x transformers (aim {BESIDE:g})")
    if case.times is not None and "over_other_row" in row:
        parts.append(f"{row['over_other_row']:.2f} x {case.times[0]} (aim {case.times[1]:g})")
    return f"{case.name}: {', '.join(parts) or 'not measured'}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(gpu)
    run(app, "benchmarks.gpu")
