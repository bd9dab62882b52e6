"""Ways to train one GPT-2 on several workers, each in fp32 and in mixed precision.

python -m benchmarks.data_parallel [--workers N] [--model-size tiny|small] [--text FILE] [--json]

The comparison of BiEchi/DistributedTrainingGPT2 (Bai, HP3C 2022) with today's means: a single-process
parameter server, DDP's all-reduce, FSDP2 by this repository's runtime, and Horovod where it is installed.
In fp32 all must give the losses of one device; the program fails if one does not.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.data_parallel_methods import (
    DDP,
    METHODS,
    ONE_DEVICE,
    Curve,
    Job,
    Tokens,
    train,
    train_by_horovod,
)
from costmodels import ModelSpec, Precision
from costmodels.catalogue import load_model
from costmodels.catalogue.local_machine import available_cores
from costmodels.errors import InputError
from planner.options.flags import run
from runtime.job.datasets import open_datasets, tokenizer_for
from runtime.job.devices import local_device_count
from runtime.settings.training_options import DataOptions
from tests.support.ranks.parity import SEED
from tests.support.worker_pool import WorkerPool

MODELS = {
    "tiny": load_model("gpt2-nano", hidden=256).model_copy(update={"name": "gpt2-tiny"}),
    "small": load_model("gpt2-small"),
}
"""Models of the study: one that a core trains in seconds, on bytes, and GPT-2 with its own tokens."""

HOROVOD = "Horovod"
MIXED: tuple[Precision, ...] = ("bf16", "fp16")
WARM_UP = 2
"""Steps before the clock starts."""
LIMIT = 1e-5
"""Largest relative difference of a loss in fp32 from one device's."""

MIB = 2**20

ON_CPUS = (
    "a worker is one core: cores share caches and memory bandwidth, and gradients cross no link",
    "the parameter server copies within one memory: on GPUs all weights and gradients pass one device's "
    "link, and one Python process starts the kernels of all; here it looks better than it is",
    "bf16 is as fast as the core's instructions for it; this says nothing of tensor cores",
    "memory is that of the process: freed memory that the allocator keeps, PyTorch's code and gloo's "
    "buffers count",
)
"""A note about figures on CPUs that may mislead."""


Curves = dict[tuple[str, Job], list[list[Curve]]]
"""Results by method and job: of each round, of each process."""


def batches_of(spec: ModelSpec, batch_size: int, steps: int, text: str | None) -> list[Tokens]:
    """Global batches [B, S + 1], drawn from the file `text`, or from Python's standard library."""
    count = batch_size * steps
    if text is None:
        samples = open_datasets(DataOptions(), spec, SEED, count, 0).train
        assert samples is not None
        rows = np.stack([samples.sample(number) for number in range(count)])
        return list(rows.reshape(steps, batch_size, -1))
    try:
        words = Path(text).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {text}: cannot be read as UTF-8 ({error}); give a text file") from error
    tokens = np.asarray(tokenizer_for(DataOptions(), spec.vocab).encode([words])[0], np.int64)
    if len(tokens) <= spec.seq:
        raise InputError(
            f"--text {text}: holds {len(tokens)} tokens, a sample takes {spec.seq + 1}; give a longer text"
        )
    starts = np.random.RandomState(SEED).randint(0, len(tokens) - spec.seq, (steps, batch_size, 1))
    return list(tokens[starts + np.arange(spec.seq + 1)])


def measure(pool: WorkerPool, jobs: Sequence[Job], batches: list[Tokens], rounds: int) -> Curves:
    """Train every job by every method, in turns, so that other work on the machine affects all alike."""
    curves: Curves = {}
    for _ in range(rounds):
        for job in jobs:
            for name, method in METHODS.items():
                ranks = 1 if method.one_process else job.workers
                curves.setdefault((name, job), []).append(pool.run(train, ranks, name, job, batches))
            if has_horovod():
                import horovod  # type: ignore[import-not-found]

                processes = horovod.run(train_by_horovod, (job, batches), num_proc=job.workers)
                curves.setdefault((HOROVOD, job), []).append(processes)
    return curves


def has_horovod() -> bool:
    """Return whether Horovod can be imported."""
    return find_spec("horovod") is not None


def rows_of(curves: Curves) -> list[dict[str, Any]]:
    """One row of the table for each method and precision.

    Times are those of the quickest round. Losses are compared with those of one device in fp32.
    """
    rows: list[dict[str, Any]] = []
    baseline: dict[Precision, float] = {}
    for (name, job), rounds in curves.items():
        step_time = min(statistics.median(processes[0].seconds[WARM_UP:]) for processes in rounds)
        speed_up = baseline.setdefault(job.precision, step_time) / step_time
        losses = [np.mean([one.losses for one in processes], axis=0).tolist() for processes in rounds]
        reference = rows[0]["losses"] if rows else losses[0]
        rows.append(
            {
                "method": name,
                "precision": job.precision,
                "step_time_s": step_time,
                "tokens_per_s": job.batch_size * job.spec.seq / step_time,
                "speed_up": speed_up,
                "efficiency": speed_up / (1 if name == ONE_DEVICE else job.workers),
                "peak_memory_bytes": max(one.peak_bytes for processes in rounds for one in processes),
                "idle_memory_bytes": max(one.idle_bytes for processes in rounds for one in processes),
                "losses": losses[0],
                "difference": relative_difference(losses, reference),
            }
        )
    return rows


def relative_difference(curves: list[list[float]], reference: list[float]) -> float:
    """Largest relative difference of the losses of `curves` from `reference`; NaN if one is."""
    expected = np.array(reference)
    return float(np.max(np.abs(np.array(curves) - expected) / np.abs(expected)))


def conclusions(rows: list[dict[str, Any]], mixed: str) -> dict[str, dict[str, float]]:
    """Ratios that answer the questions of the study, by method."""
    by = {(row["method"], row["precision"]): row for row in rows}
    names = list(dict.fromkeys(row["method"] for row in rows))
    others = [name for name in names if name not in (ONE_DEVICE, DDP)]

    def over_ddp(precision: str) -> dict[str, float]:
        ddp = by[DDP, precision]["tokens_per_s"]
        return {name: by[name, precision]["tokens_per_s"] / ddp for name in others}

    def memory(name: str) -> int:
        used: int = by[name, "fp32"]["peak_memory_bytes"] - by[name, "fp32"]["idle_memory_bytes"]
        return used

    return {
        "speed over DDP, fp32": over_ddp("fp32"),
        f"speed over DDP, {mixed}": over_ddp(mixed),
        f"speed of {mixed} over fp32": {
            name: by[name, mixed]["tokens_per_s"] / by[name, "fp32"]["tokens_per_s"] for name in names
        },
        "memory over DDP, fp32, above idle": {name: memory(name) / memory(DDP) for name in others},
    }


def devices_of(device: str | None, workers: int | None) -> tuple[int, int]:
    """The GPUs of this machine, none for `cpu`, and the workers that train on them or on CPU cores."""
    if device not in (None, "cpu"):
        raise InputError(f"--device {device}: give cpu, or leave it out to train on the GPUs")
    gpus = 0 if device == "cpu" else local_device_count()
    workers = workers if workers is not None else gpus or 2
    if workers < 2:
        raise InputError(f"{workers} workers share nothing; give --workers of at least 2, or --device cpu")
    if gpus and workers > gpus:
        raise InputError(f"--workers {workers}: this machine has {gpus} GPUs; give fewer, or --device cpu")
    return gpus, workers


app = typer.Typer(add_completion=False)


@app.command()
def data_parallel(
    workers: Annotated[int | None, typer.Option(help="Devices; all GPUs, or 2 CPU cores.")] = None,
    model_size: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "tiny",
    steps: Annotated[int, typer.Option(help=f"Steps to time, after {WARM_UP} to warm up.")] = 6,
    rounds: Annotated[int, typer.Option(help="Turns of each method; the quickest counts.")] = 2,
    batch_size: Annotated[int | None, typer.Option(help="Sequences of a step; 4 a worker.")] = None,
    text: Annotated[
        str | None, typer.Option(help="Text file; the standard library of Python when not given.")
    ] = None,
    mixed_precision: Annotated[str, typer.Option(help=f"One of {', '.join(MIXED)}.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="cpu, to leave the GPUs alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train the same GPT-2 in every way and compare speed, memory and losses."""
    if model_size not in MODELS:
        raise InputError(f"--model-size {model_size}: choose one of {', '.join(MODELS)}")
    mixed = next((one for one in MIXED if one == mixed_precision), None)
    if mixed is None:
        raise InputError(f"--mixed-precision {mixed_precision}: choose one of {', '.join(MIXED)}")
    if steps < 1 or rounds < 1:
        raise InputError(f"--steps {steps} --rounds {rounds}: both must be at least 1")
    gpus, workers = devices_of(device, workers)
    if mixed == "fp16" and not gpus:
        raise InputError("--mixed-precision fp16: needs GPUs; train with bf16 on a CPU")
    batch_size = 4 * workers if batch_size is None else batch_size
    if batch_size < 1 or batch_size % workers:
        raise InputError(f"--batch-size {batch_size}: must be a positive multiple of the {workers} workers")
    spec = MODELS[model_size]
    load = os.getloadavg()[0]
    batches = batches_of(spec, batch_size, WARM_UP + steps, text)
    pool = WorkerPool(workers, accelerated=gpus > 0)
    precisions: tuple[Precision, ...] = ("fp32", mixed)
    jobs = [Job(spec, workers, batch_size, precision, on_cpu=not gpus) for precision in precisions]
    rows = rows_of(measure(pool, jobs, batches, rounds))
    worst = float(np.max([row["difference"] for row in rows if row["precision"] == "fp32"]))
    report = {
        "model": spec.name,
        "parameters": spec.parameters,
        "workers": workers,
        "device": torch.cuda.get_device_name(0) if gpus else f"of {available_cores()} CPU cores",
        "torch": torch.__version__,
        "load_average": load,
        "batch_size": batch_size,
        "sequence": spec.seq,
        "steps": steps,
        "rounds": rounds,
        "rows": rows,
        "horovod": "installed" if has_horovod() else "not installed",
        "conclusions": conclusions(rows, mixed),
        "largest_fp32_difference": worst,
    }
    if as_json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        show(report, on_cpu=not gpus)
    _check_losses(worst)


def _check_losses(worst: float) -> None:
    """End with exit code 1 if losses in fp32 differ by more than `LIMIT`, or are NaN."""
    if not worst <= LIMIT:
        print(
            f"benchmarks.data_parallel: losses in fp32 differ by {worst:.1e}, more than {LIMIT}",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def show(report: dict[str, Any], on_cpu: bool) -> None:
    """Print the table, the ratios that follow from it and, for CPUs, a note about misleading figures."""
    print(
        f"{report['model']}: {report['parameters'] / 1e6:.1f} M parameters, {report['workers']} workers, "
        f"each one {report['device']}, {report['batch_size']} x {report['sequence']} tokens a step, "
        f"median of {report['steps']} steps, quickest of {report['rounds']} rounds, torch {report['torch']}"
    )
    print("\nmethod            precision  tokens/s  speed-up  efficiency  peak MiB  last loss  difference")
    for row in report["rows"]:
        print(
            f"{row['method']:<18}{row['precision']:<9}{row['tokens_per_s']:>10,.0f}{row['speed_up']:>9.2f}x"
            f"{row['efficiency']:>12.0%}{row['peak_memory_bytes'] / MIB:>10,.0f}{row['losses'][-1]:>11.6f}"
            f"{row['difference']:>12.1e}"
        )
    if report["horovod"] != "installed":
        print(f"{HOROVOD:<18}{report['horovod']}")
    print(
        "\nspeed-up: over one device in the same precision; peak MiB: of the fullest process or GPU; "
        "difference: the largest relative one of a loss from one device's in fp32"
    )
    if on_cpu:
        idle = max(row["idle_memory_bytes"] for row in report["rows"])
        print(f"a process that has only loaded PyTorch: {idle / MIB:,.0f} MiB")
    print()
    for title, ratios in report["conclusions"].items():
        print(f"{title}: " + "; ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    if on_cpu:
        print("\nWhere figures of CPUs mislead:")
        if report["load_average"] > 0.5:
            print(
                f"- the load average was {report['load_average']:.1f} before the start: other work took part"
            )
        if report["workers"] > available_cores():
            print(f"- {report['workers']} workers share {available_cores()} cores: no speed-up can show")
        for line in ON_CPUS:
            print(f"- {line}")


if __name__ == "__main__":
    run(app, "benchmarks.data_parallel")
