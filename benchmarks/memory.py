"""Played tapes against dry runs of the runtime, on random models and layouts.

python -m benchmarks.memory [--examples N] [--seed S] [--layers drawn|compiled|eager] [--kind KIND] [--small]
                            [--json]

Each example is a model (GPT-2 or Llama, perhaps with experts or latent attention, windows, sinks, Gated
DeltaNet, scores with caps or modules that predict further tokens), a legal layout of up to 64 ranks, one of
its pipeline ranks, and layers that are compiled or not. The peak and each category of it must be within 0.1 %
or 1 MiB of those of the dry run. Moments whose totals are that close may take turns as the highest: the
composition is compared with that of the closest of them. Units that have no tape yet are recorded first;
those that cannot be are counted as unknown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from costmodels.tapes.player import CATEGORIES
from tests.support.played_memory import KINDS, Errors, UnknownError, allowed, compare, draw

LAYERS = {"compiled": True, "eager": False}


def report(errors: list[Errors], layouts: list[str]) -> dict[str, Any]:
    """Errors of all examples, by category."""
    result: dict[str, Any] = {"examples": len(errors), "misses": sum(bool(one.misses) for one in errors)}
    for name in ("peak", *CATEGORIES):
        off = [abs(one.peak if name == "peak" else one.by_kind[name]) for one in errors]
        over = [size / allowed(one.traced[name]) for size, one in zip(off, errors, strict=True)]
        worst = over.index(max(over))
        result[name] = {
            "median_bytes": statistics.median(off),
            "worst_bytes": off[worst],
            "worst_of_allowed": over[worst],
            "worst_example": layouts[worst],
        }
    return result


def main() -> None:
    """Compare as many examples as asked for."""
    parser = argparse.ArgumentParser(description="Hold played tapes against dry runs.")
    parser.add_argument("--examples", type=int, default=100, help="how many models and layouts to compare")
    parser.add_argument("--seed", type=int, default=0, help="of their random choice")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--layers", choices=["drawn", *LAYERS], default="drawn", help="whether layers are compiled"
    )
    parser.add_argument(
        "--kind", choices=["drawn", *KINDS], default="drawn", help="what the models have besides"
    )
    parser.add_argument("--small", action="store_true", help="of few layers and micro batches")
    options = parser.parse_args()
    kind = None if options.kind == "drawn" else options.kind
    chosen, names = random.Random(options.seed), list[str]()
    errors: list[Errors] = []
    started = time.perf_counter()
    unknown = 0
    while len(errors) + unknown < options.examples:
        drawn = draw(chosen.choice, options.small, LAYERS.get(options.layers), kind)
        if drawn is None:
            continue
        try:
            errors.append(compare(*drawn))
        except UnknownError as error:
            unknown += 1
            if not options.json:
                print(f"{len(errors) + unknown} unknown: {error}", flush=True)
            continue
        names.append(drawn.describe())
        if errors[-1].misses and not options.json:
            number = len(errors) + unknown
            print(f"{number} miss ({', '.join(errors[-1].misses)}): {names[-1]}", flush=True)
    found = report(errors, names) | {"unknown": unknown, "seconds": time.perf_counter() - started}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['examples']} examples in {found['seconds']:.0f} s, "
        f"{found['misses']} of them off by more than allowed, {unknown} unknown"
    )
    for name in ("peak", *CATEGORIES):
        one = found[name]
        print(
            f"{name:14} median {one['median_bytes'] / 2**20:8.3f} MiB, "
            f"worst {one['worst_bytes'] / 2**20:8.3f} MiB "
            f"({one['worst_of_allowed']:.0%} of what is allowed): {one['worst_example'].partition(': ')[0]}"
        )


if __name__ == "__main__":
    main()
