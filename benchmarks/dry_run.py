"""The time of a dry run from the command line, beside importing PyTorch and the runtime.

python -m benchmarks.dry_run [--repeats N] [--json]

Each command runs in a process of its own, as a user runs it, without cached dry runs. They run in turns with
a process that only imports, because other work on a machine slows all of them. The result is the ratio of
medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from costmodels.catalogue.local_machine import available_cores
from costmodels.pytorch import full_version
from planner.options.flags import run

IMPORTS = ("-c", "import torch, runtime.dryrun.run")

H100 = ("--device", "h100", "--max-global-batch-size")

COMMANDS: dict[str, tuple[float, tuple[str, ...]]] = {
    "llama3-70b on 64": (2.0, ("--model", "llama3-70b", "--world-size", "64", *H100, "256")),
    "llama3-70b on 64, four unlike stages": (
        4.0,
        ("--model", "llama3-70b", "--world-size", "64", *H100, "256", "--pin", "pp=4", "--pin", "vpp=1"),
    ),
    "deepseek-v3 on 2,048": (6.0, ("--model", "deepseek-v3", "--world-size", "2048", *H100, "15360")),
}
"""Most time of each command as a multiple of the imports' time, and its flags of `planner dryrun`."""


def seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Wall seconds of a Python process."""
    since = time.perf_counter()
    subprocess.run(
        [sys.executable, *command],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    return time.perf_counter() - since


def dry_run(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each command.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time dry runs from the command line."""
    times: dict[str, list[float]] = {name: [] for name in ("imports", "again", *COMMANDS)}
    for _ in range(repeats):
        times["imports"].append(seconds(IMPORTS, {}))
        for number, (name, (_, flags)) in enumerate(COMMANDS.items()):
            with tempfile.TemporaryDirectory() as folder:
                kept = {"XDG_CACHE_HOME": folder}
                times[name].append(seconds(("-m", "planner", "dryrun", *flags), kept))
                if number == 0:
                    times["again"].append(seconds(("-m", "planner", "dryrun", *flags), kept))
    median = {name: statistics.median(found) for name, found in times.items()}
    multiples = {name: median[name] / median["imports"] for name in times if name != "imports"}
    if as_json:
        print(json.dumps({"seconds": times, "multiples": multiples}, indent=2))
        return
    print(f"PyTorch {full_version()}, {available_cores()} cores, medians of {repeats}")
    print(f"imports {median['imports']:.1f} s")
    for name, (goal, _) in COMMANDS.items():
        print(f"{name}: {median[name]:.1f} s, {multiples[name]:.1f} x the imports (goal {goal:g})")
    print(f"the first again, kept: {median['again']:.1f} s, {multiples['again']:.1f} x the imports")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(dry_run)
    run(app, "benchmarks.dry_run")
