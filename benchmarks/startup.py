"""The time of a job to its first step: `python -m benchmarks.startup`.

`planner launch` trains a tiny model on CPU ranks, until the line of its first step. It is compared with the
least work of any job: a process that imports PyTorch and starts as many processes, which import it too
(`spawn`) or share the import (`fork`). For comparison the same job also starts under torchrun, which starts
the ranks of GPUs and of several nodes. All are timed in turns, because other work on a machine slows all of
them. The results are ratios of medians.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodels.catalogue.local_machine import available_cores
from costmodels.errors import InputError
from planner.options.flags import run
from runtime.launch.torchrun import torchrun_command

BASELINES = ("spawn", "fork")

JOB = (
    *("--model", "gpt2-nano", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *(
        "--seq-length",
        "16",
        "--device",
        "cpu",
        "--train-iters",
        "1",
        "--log-interval",
        "1",
        "--eval-iters",
        "0",
    ),
)
"""A model whose step takes milliseconds, on the bundled corpus."""


def processes_s(method: str, ranks: int) -> float:
    """Seconds until a process has imported PyTorch, and `ranks` that it starts have run."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "benchmarks.startup_processes", method, str(ranks)], check=True)
    return time.perf_counter() - started


def first_step_s(command: Sequence[str]) -> float:
    """Seconds until a job logs its first step."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        seconds, lines = 0.0, []
        for line in job.stdout:
            lines.append(line)
            if not seconds and "lm loss" in line:
                seconds = time.perf_counter() - started
    if job.returncode or not seconds:
        raise RuntimeError(f"{shlex.join(command)} logged no step:\n{''.join(lines)}")
    return seconds


def timed(ranks: int, rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds of each way to start, round by round."""
    batch = ("--global-batch-size", str(2 * ranks))
    launch = (sys.executable, "-m", "planner", "launch", *JOB, *batch, "--world-size", str(ranks))
    torchrun = torchrun_command(ranks, [*JOB, *batch])
    first_step_s(
        [*launch, "--log-dir", str(folder / "first")]
    )  # The first run prepares the corpus, and fills caches.
    found: dict[str, list[float]] = {name: [] for name in (*BASELINES, "launch", "torchrun")}
    for number in range(rounds):
        for method in BASELINES:
            found[method].append(processes_s(method, ranks))
        found["launch"].append(first_step_s([*launch, "--log-dir", str(folder / str(number))]))
        found["torchrun"].append(first_step_s(torchrun))
        say(f"round {number + 1}: " + ", ".join(f"{name} {one[-1]:.2f} s" for name, one in found.items()))
    return found


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratios of the time to the first step to each baseline."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratios = {
        f"{job}_to_{base}": medians[job] / medians[base]
        for job in ("launch", "torchrun")
        for base in BASELINES
    }
    return {"seconds": found, "medians": medians, "ratios": ratios}


def startup(
    ranks: Annotated[int, typer.Option(help="Ranks on this machine's CPU.")] = 2,
    rounds: Annotated[int, typer.Option(help="Times that each is started.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the time to a job's first step, and the least time of any start."""
    for name, number in (("ranks", ranks), ("rounds", rounds)):
        if number < 1:
            raise InputError(f"--{name} {number}: must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        found = summary(
            timed(ranks, rounds, Path(folder), lambda line: None if as_json else print(line, flush=True))
        )
    if as_json:
        print(json.dumps({"ranks": ranks, "cores": available_cores(), **found}))
        return
    medians, ratios = found["medians"], found["ratios"]
    print(f"{ranks} ranks on {available_cores()} cores, medians of {rounds}:")
    for name, what in (
        ("spawn", f"import PyTorch and start {ranks} processes that import it"),
        ("fork", f"import PyTorch and fork {ranks} processes"),
        ("launch", "planner launch to its first step"),
        ("torchrun", "torchrun to its first step"),
    ):
        print(f"{medians[name]:7.2f} s  {what}")
    for job, what in (("launch", "planner launch"), ("torchrun", "torchrun")):
        spawned, forked = (ratios[f"{job}_to_{base}"] for base in BASELINES)
        print(f"{what} takes {spawned:.2f} x the former, {forked:.2f} x the latter")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(startup)
    run(app, "benchmarks.startup")
