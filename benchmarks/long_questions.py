"""The time of questions that need several searches, beside one search of the same job.

python -m benchmarks.long_questions [--turns N]

Questions are several sizes, an explanation and a page, for mixtures of experts, whose searches are longest.
Each turn searches once for the same job and asks the question, one after the other, as the machine is shared.
The median of the turns' ratios is printed, by the clock and on the processors (of this process and of its
helpers together). For several sizes, the compared search is that of the size with the longest search.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from planner import explain, search, sizes, suggest
from planner.report.contents import gather
from planner.world_sizes import parse_world_sizes

MOST = 5.0
"""Most time of a question, in searches."""


class Question(NamedTuple):
    """A question of several searches, and functions that do one search of the same job."""

    name: str
    ask: Callable[[], object]
    searches: tuple[Callable[[], object], ...]


def questions() -> Iterator[Question]:
    """All questions."""
    jobs: list[tuple[str, int, str, dict[str, Any]]] = [
        ("mixtral-8x7b", 64, "64..512", {"device": "h100", "max_global_batch_size": 256}),
        ("qwen3-30b-a3b", 64, "64..512", {"device": "h100", "max_global_batch_size": 512}),
        ("deepseek-v3", 512, "512..2048", {"device": "h100", "max_global_batch_size": 4096}),
    ]
    for model, world, several, job in jobs:
        one = partial(search, model, world_size=world, **job)
        each = [partial(search, model, world_size=size, **job) for size in parse_world_sizes(several, 8)]
        plan = suggest(model, world_size=world, **job)
        of_sizes = partial(sizes, model, world_size=several, **job)
        why = partial(explain, model, world_size=world, **job)
        yield Question(f"{model}, sizes {several}", of_sizes, tuple(each))
        yield Question(f"{model} on {world}, explained", why, (one,))
        yield Question(f"{model} on {world}, page", partial(gather, plan), (one,))


def seconds(ask: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call by the clock, and on the processors."""
    started, before = time.perf_counter(), _processor()
    ask()
    return time.perf_counter() - started, _processor() - before


def _processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Print a line for each question."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="how often each question is asked")
    turns = parser.parse_args().turns
    print(f"{os.cpu_count()} processors", flush=True)
    for question in questions():
        ratios = []
        for _ in range(turns):
            single = [seconds(one) for one in question.searches]
            longest = max(single)
            taken = seconds(question.ask)
            ratios.append((taken[0], longest[0], taken[0] / longest[0], taken[1] / longest[1]))
        whole, one, clock, busy = map(statistics.median, zip(*ratios, strict=True))
        print(
            f"{question.name}: {whole:.2f} s, one search {one:.2f} s: {clock:.1f} searches by the clock"
            f"{'' if clock <= MOST else f', more than {MOST:g}'}; {busy:.1f} on the processors",
            flush=True,
        )


if __name__ == "__main__":
    main()
