"""The speed of the search: layouts considered and priced, and the time of the whole command.

python -m benchmarks.search [--json] [--calculon-system FILE]

Calculon and llm-analysis also solve the first problem, if they are installed (`benchmarks.other_searches`).

Layouts priced a second: memory of every legal one and step time of those that fit. A search prices fewer:
only layouts whose lower bound allows one of the first places. It also builds the space, ranks, and simulates
the first plans. The printed time is not that of the first search of a process.

A whole process is the command as an installed package runs it: its modules are compiled once, into a folder
of this program. Its first search is printed too, and the ratio of its time to that of a process that only
imports the libraries. Both are run in turns, and the median of the turns' ratios is printed, by the clock and
on the processor: machines differ, and other work runs on them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.other_searches import calculon, llm_analysis
from costmodels.pricing import peak_memory, price
from planner import search
from planner.ranking.result import SearchResult

PROBLEMS: list[tuple[str, dict[str, Any]]] = [
    ("gpt-22b", {"world_size": 64, "max_global_batch_size": 16}),
    ("llama2-70b", {"world_size": 64, "device": "a100-80g", "max_global_batch_size": 16}),
    ("llama2-70b", {"world_size": 64, "max_global_batch_size": 1024}),
    ("llama3-405b", {"world_size": 16384, "device": "h100-sxm", "global_batch_size": 2048}),
    ("mixtral-8x7b", {"world_size": 64, "device": "h100-sxm", "max_global_batch_size": 256}),
    ("deepseek-v3", {"world_size": 2048, "device": "h100-sxm", "max_global_batch_size": 4096}),
    ("deepseek-v3", {"world_size": 2048, "device": "h100-sxm", "max_global_batch_size": 15360}),
]

LIBRARIES = "import numpy, pydantic, typer, rich"
"""Imports that every process with a search needs."""

REPEATS = 3
"""Number of repeats; the quickest is reported, as longer times come from other work on the machine."""

TURNS = 7
"""Number of pairs of whole processes."""


def measure(model: str, arguments: dict[str, Any], system: str | None) -> dict[str, Any]:
    """One problem: counts, seconds of the search alone and of the whole process, and those of other tools."""
    results = [search(model, **arguments) for _ in range(REPEATS)]
    seconds = min(result.elapsed_s for result in results)
    pricing = min(_pricing(result) for result in results)
    flags = [
        text for name, value in arguments.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "planner", "suggest", "--model", model, *flags]
    whole, first, clock, processor = _process(command)
    return {
        "model": model,
        **arguments,
        "considered": results[0].considered,
        "legal": results[0].legal,
        "feasible": results[0].feasible,
        "search_s": seconds,
        "considered_per_s": results[0].considered / seconds,
        "priced_per_s": results[0].legal / pricing,
        "first_search_s": first,
        "process_s": whole,
        "process_to_libraries": clock,
        "processor_to_libraries": processor,
        "solved": results[0].solutions,
        "others": [] if model != PROBLEMS[0][0] else _others(results[0], system),
    }


def _others(result: SearchResult, system: str | None) -> list[dict[str, Any]]:
    """Seconds of other tools for the same problem, and the layouts a second of this search over theirs."""
    problem = result.problem
    where = problem.model, problem.cluster, problem.batch.size
    rate = result.legal / result.elapsed_s
    found = [asked for asked in (calculon(*where, system), llm_analysis(*where)) if asked is not None]
    return [asdict(asked) | {"ratio": rate * asked.seconds / max(asked.layouts, 1)} for asked in found]


def _pricing(result: SearchResult) -> float:
    """Seconds of pricing the legal layouts again."""
    problem, table = result.problem, result.table
    started = time.perf_counter()
    memory = peak_memory(problem.model, problem.cluster, problem.engine, table)
    fitting = np.flatnonzero(memory <= problem.cluster.memory_bytes)
    price(problem.model, problem.cluster, problem.engine, table.take(fitting))
    return time.perf_counter() - started


def _process(command: list[str]) -> tuple[float, float, float, float]:
    """Seconds of a process and of the search in it, the least of several. Also the ratio of its time to that
    of importing `LIBRARIES`, by the clock and on the processor, the median of several pairs."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    whole, first = [], []
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**kept, "PYTHONPYCACHEPREFIX": folder}
        for turn in range(1 + TURNS):
            fewest_s, least_s, _ = _run([sys.executable, "-c", LIBRARIES], environment)
            seconds, busy_s, text = _run(command, environment)
            if turn:  # The first processes compile the modules.
                whole.append(seconds)
                ratios.append((seconds / fewest_s, busy_s / least_s))
                first += [float(found) for found in re.findall(r" fit; ([\d.]+) s$", text, re.MULTILINE)]
    clock, processor = map(statistics.median, zip(*ratios, strict=True))
    return min(whole), min(first), clock, processor


def _run(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Seconds of a command by the clock and on the processor, and its output."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
        env=environment,
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, busy, done.stdout


def _print(row: dict[str, Any]) -> None:
    most = row.get("max_global_batch_size")
    batch = f"at most {most}" if most else f"{row['global_batch_size']}"
    print(
        f"{row['model']} on {row['world_size']}, {batch} sequences: "
        f"{row['considered']:,} layouts considered, {row['legal']:,} legal "
        f"(priced {row['priced_per_s']:,.0f} a second where all are), {row['feasible']:,} fit; "
        f"{row['solved']:,} with solved degrees among them; "
        f"search {row['search_s']:.3f} s; whole process {row['process_s']:.2f} s, its first search "
        f"{row['first_search_s']:.3f} s; {row['process_to_libraries']:.1f} x importing numpy, pydantic, "
        f"typer and rich ({row['processor_to_libraries']:.1f} x on the processor)",
        flush=True,
    )
    for other in row["others"]:
        print(
            f"  {other['tool']}: {other['layouts']:,} layouts in {other['seconds']:.2f} s; "
            f"the search above takes in {other['ratio']:,.0f} times as many a second"
        )


def main() -> None:
    """Print the figures of all problems."""
    parser = argparse.ArgumentParser(description="Time the search for layouts.")
    parser.add_argument("--json", action="store_true", help="print one JSON object a problem, as a list")
    parser.add_argument(
        "--calculon-system", metavar="FILE", help="the file systems/a100_80g.json of Calculon's repository"
    )
    given = parser.parse_args()
    rows = []
    for model, arguments in PROBLEMS:
        rows.append(measure(model, arguments, given.calculon_system))
        if not given.json:
            _print(rows[-1])
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    if not rows[0]["others"]:
        print("not compared: llm-analysis is not installed, nor is calculon (with --calculon-system)")


if __name__ == "__main__":
    main()
