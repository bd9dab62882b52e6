"""Comparison of searches on nodes of two kinds with brute force: every split of small problems, simulated.

python -m benchmarks.heterogeneous [--problems 100] [--seed 0]

Each problem has a random model, two kinds of nodes, a batch and, for half of the problems, scarce memory.
Brute force prices every layout of one chunk with every split of its layers over its stages. It simulates the
pipelines of all layouts that fit, and takes the fastest. The program prints the ratio of the search's step
time to that, and the problems that differ.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from costmodels import ModelSpec
from costmodels.pricing import peak_memory, price
from costmodels.spec.mixed_cluster import mixed_cluster
from costmodels.spec.table import LayoutTable
from planner.inputs.batch import Batch
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import DEFAULT_ENGINE, resolve_engine
from planner.inputs.pins import Pins
from planner.problem import Problem
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult

PAIRS = [
    ("a100-80g", "v100-32g"),
    ("v100-32g", "a100-80g"),
    ("h100", "v100-32g"),
    ("h100", "a100-80g"),
    ("h100", "h100"),
]

PINS: Pins = {
    "virtual_pipeline_parallel": 1,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "zero_replicas": 1,
}
"""Pins of the fields that brute force does not vary."""


def drawn(draw: random.Random) -> tuple[Problem, LayoutTable]:
    """A random small problem, and all of its layouts with all of their splits."""
    sizes = {
        "layers": draw.randint(3, 8),
        "hidden": draw.choice([256, 1024, 4096]),
        "heads": 8,
        "vocab": draw.choice([1000, 50000]),
        "seq": draw.choice([512, 2048]),
    }
    model = ModelSpec.model_validate({"name": "tiny", **sizes})
    names, nodes = draw.choice(PAIRS), draw.choice([(1, 1), (2, 1), (1, 2)])
    local = draw.choice([1, 2])
    parts = [resolve_cluster(name, count * local, local) for name, count in zip(names, nodes, strict=True)]
    batch = Batch(draw.choice([4, 8, 16]))
    problem = Problem(model, mixed_cluster(*parts), resolve_engine(DEFAULT_ENGINE), batch, "fp16", PINS)
    every = with_every_split(problem.space().table, model.layers)
    share = draw.choice([None, None, 0.3, 0.6])
    if share is not None:
        limit = float(np.quantile(peak_memory(model, problem.cluster, problem.engine, every), share))
        limits = limit, limit * draw.choice([0.7, 1.0, 1.4])
        parts = [
            part.model_copy(update={"memory_bytes": held}) for part, held in zip(parts, limits, strict=True)
        ]
        problem = replace(problem, cluster=mixed_cluster(*parts))
    return problem, every


def with_every_split(table: LayoutTable, layers: int) -> LayoutTable:
    """Each row with every split of its layers over its stages."""
    rows, words = [], []
    for row in range(len(table)):
        for word in _splits(layers, int(table.pipeline_parallel[row])):
            rows.append(row)
            words.append(word)
    splits = tuple(dict.fromkeys(words))
    number = {word: place for place, word in enumerate(splits)}
    split = np.array([number[word] for word in words])
    return replace(table.take(np.array(rows)), split=split, splits=splits)


def _splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, layers)))


def fastest(problem: Problem, every: LayoutTable) -> tuple[float, str]:
    """Simulated step time of the fastest layout that fits, and the layout; infinite if none fits."""
    where = problem.model, problem.cluster, problem.engine
    fits = peak_memory(*where, every) <= problem.cluster.memory_bytes
    if not fits.any():
        return np.inf, "nothing"
    table = every.take(fits)
    seconds = price(*where, table).simulate(np.arange(len(table))).step_time_s
    layout = table.layout(int(seconds.argmin()))
    return float(seconds.min()), f"{layout.describe()} {layout.layers_per_stage}"


def compared(problem: Problem, every: LayoutTable) -> tuple[float, str]:
    """Step time of the search over that of brute force, and both layouts in words."""
    result: SearchResult = rank(problem, problem.space(), time.perf_counter())
    seconds, what = fastest(problem, every)
    if result.best is None:
        return (1.0 if np.isinf(seconds) else np.inf), f"nothing fits, brute force has {what}"
    best = result.best
    words = f"{best.layout.describe()} {best.layout.layers_per_stage}, brute force has {what}"
    return best.estimate.step_time_s / seconds, words


def main() -> None:
    """Print the number of problems that agree, and those that do not."""
    parser = argparse.ArgumentParser(description="Hold searches on nodes of two kinds to brute force.")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    ratios = []
    for _ in range(given.problems):
        problem, every = drawn(draw)
        ratio, words = compared(problem, every)
        ratios.append(ratio)
        if ratio > 1 + 1e-6:
            print(f"{ratio:.4f}: {problem.cluster.device.name}, {problem.model.layers} layers: {words}")
    found = np.array(ratios)
    print(
        f"{len(found)} problems: {np.count_nonzero(found <= 1 + 1e-6)} as fast as brute force, "
        f"the others {found.max():.4f} x its step time at most"
    )


if __name__ == "__main__":
    main()
