"""Played tapes against dry runs of the runtime, on random models and layouts.

python -m benchmarks.memory [--examples N] [--seed S] [--layers drawn|compiled|eager] [--kind KIND] [--small]
    [--where FIELD=VALUE ...] [--jobs J] [--file FILE [--seconds T]] [--json]

Each example is a model (GPT-2 or Llama, perhaps with experts or latent attention, windows, sinks, Gated
DeltaNet, scores with caps or modules that predict further tokens), a legal layout of up to 64 ranks, one of
its pipeline ranks, and layers that are compiled or not. The peak and each category of it must be within 0.1 %
or 1 MiB of those of the dry run. Moments whose totals are that close may take turns as the highest: the
composition is compared with that of the closest of them. Units that have no tape yet are recorded first;
those that cannot be are counted as unknown. `--where precision=fp8 seq=192` keeps examples whose model or
layout has these values.

With a file, examples are kept in it as they come, and another call with the same file goes on after them: a
run may be made in pieces. It is of one seed, one version of PyTorch and one state of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from costmodels import Layout, ModelSpec
from costmodels.tapes import store
from costmodels.tapes.player import CATEGORIES
from tests.support.played_memory import (
    KINDS,
    Errors,
    Example,
    UnknownError,
    allowed,
    compare,
    draw,
    record,
)

LAYERS = {"compiled": True, "eager": False}

MOST_DRAWS = 50_000
"""Before an example that is asked for."""

QUANTITIES = ("peak", *CATEGORIES)


@dataclass(frozen=True)
class Result:
    """What has come of one example."""

    number: int
    text: str
    """The example in one line."""
    recording_s: float
    """CPU time of tapes that were missing."""
    comparing_s: float = 0.0
    """CPU time of the dry run, and of what is played."""
    unknown: str = ""
    """Why it is not played."""
    off: dict[str, float] | None = None
    """Bytes that the peak and its categories are off by."""
    traced: dict[str, float] | None = None
    """Those of the dry run."""

    @property
    def misses(self) -> list[str]:
        """What is off by more than allowed."""
        return [] if self.off is None else [name for name in QUANTITIES if self.share(name) > 1]

    def share(self, name: str) -> float:
        """How much of what is allowed a quantity is off by."""
        assert self.off is not None and self.traced is not None
        return abs(self.off[name]) / allowed(self.traced[name])


def code_digest() -> str:
    """A digest of the code that is compared."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for folder in ("costmodels", "runtime"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def drawn(seed: int, layers: str, kind: str, small: bool, where: list[str]) -> Iterator[Example]:
    """Examples without end, of which `where` is true.

    Raises:
        ValueError: none is among many.
    """
    chosen, wanted = random.Random(seed), [field.split("=", 1) for field in where]

    def is_wanted(model: ModelSpec, layout: Layout) -> bool:
        owners = [layout if name in Layout.model_fields else model for name, _ in wanted]
        return all(
            str(getattr(one, name)) == value for one, (name, value) in zip(owners, wanted, strict=True)
        )

    own, missed = None if kind == "drawn" else kind, 0
    while missed < MOST_DRAWS:
        example = draw(chosen.choice, small, LAYERS.get(layers), own, is_wanted)
        missed += 1
        if example is not None:
            yield example
            missed = 0
    raise ValueError(f"none of {MOST_DRAWS} examples has {' '.join(where)}")


def result_of(number: int, example: Example) -> Result:
    """Compare one example."""
    model, layout, rank, compiled = example
    begun = time.process_time()
    try:
        record(model, layout, compiled)
    except UnknownError as error:
        return Result(number, example.describe(), time.process_time() - begun, unknown=str(error))
    recorded = time.process_time()
    errors: Errors = compare(model, layout, rank, compiled)
    return Result(
        number,
        example.describe(),
        recorded - begun,
        time.process_time() - recorded,
        off={"peak": errors.peak, **errors.by_kind},
        traced=errors.traced,
    )


class Kept:
    """The results of a run so far, in a file if there is one."""

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self.path, self.results = path, dict[int, Result]()
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps(run) + "\n")
            return
        first, *lines = path.read_text().splitlines()
        if json.loads(first) != run:
            raise ValueError(f"{path} is of another run: {first}, and this is {json.dumps(run)}")
        for result in (Result(**json.loads(line)) for line in lines):
            self.results[result.number] = result

    def add(self, result: Result) -> None:
        """Keep one more."""
        self.results[result.number] = result
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")


def compared(examples: list[tuple[int, Example]], jobs: int, until: float) -> Iterator[Result]:
    """Results of examples as they come; none is begun after a time."""
    if jobs == 1:
        for number, example in examples:
            if time.perf_counter() >= until:
                return
            yield result_of(number, example)
        return
    waiting, under_way = iter(examples), set[Future[Result]]()
    # A process that has run a dry run has threads, and cannot be copied.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        while True:
            while len(under_way) < jobs and time.perf_counter() < until:
                following = next(waiting, None)
                if following is None:
                    break
                under_way.add(pool.submit(result_of, *following))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for one in done:
                yield one.result()


def report(results: list[Result]) -> dict[str, Any]:
    """Errors of all examples, by category, and what they took."""
    known = [one for one in results if not one.unknown]
    found: dict[str, Any] = {
        "examples": len(known),
        "misses": sum(bool(one.misses) for one in known),
        "unknown": len(results) - len(known),
        "recording_s": sum(one.recording_s for one in results),
        "comparing_s": sum(one.comparing_s for one in results),
    }
    for name in QUANTITIES if known else ():
        worst = max(known, key=lambda one: one.share(name))
        off = [abs(one.off[name]) for one in known if one.off is not None]
        found[name] = {
            "median_bytes": statistics.median(off),
            "worst_bytes": abs((worst.off or {})[name]),
            "worst_of_allowed": worst.share(name),
            "worst_example": worst.text,
        }
    return found


def show(result: Result) -> None:
    """Say what is wrong with an example, if anything is."""
    if result.unknown:
        print(f"{result.number} unknown: {result.unknown}", flush=True)
    elif result.misses:
        print(f"{result.number} miss ({', '.join(result.misses)}): {result.text}", flush=True)


def main() -> None:
    """Compare as many examples as asked for."""
    parser = argparse.ArgumentParser(description="Hold played tapes against dry runs.")
    parser.add_argument("--examples", type=int, default=100, help="how many models and layouts to compare")
    parser.add_argument("--seed", type=int, default=0, help="of their random choice")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compare")
    parser.add_argument("--file", type=Path, help="where results are kept, to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no example after these")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--layers", choices=["drawn", *LAYERS], default="drawn", help="whether layers are compiled"
    )
    parser.add_argument(
        "--kind", choices=["drawn", *KINDS], default="drawn", help="what the models have besides"
    )
    parser.add_argument("--small", action="store_true", help="of few layers and micro batches")
    parser.add_argument(
        "--where",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="of a model or layout, as examples have it",
    )
    options = parser.parse_args()
    started = time.perf_counter()
    for name, has_value, _ in (field.partition("=") for field in options.where):
        if not has_value or name not in {**ModelSpec.model_fields, **Layout.model_fields}:
            parser.error(f"--where {name}: no FIELD=VALUE of a model or layout")
    given = {name: getattr(options, name) for name in ("seed", "layers", "kind", "small", "where")}
    run = given | {"torch": store.installed_version(), "code": code_digest()}
    try:
        kept = Kept(options.file, run)
    except ValueError as error:
        parser.error(str(error))
    numbered = enumerate(islice(drawn(**given), options.examples), start=1)
    try:
        missing = [(number, example) for number, example in numbered if number not in kept.results]
    except ValueError as error:
        parser.error(str(error))
    if not options.json:
        for result in kept.results.values():
            show(result)
    for result in compared(missing, options.jobs, started + options.seconds):
        kept.add(result)
        if not options.json:
            show(result)
    found = report(list(kept.results.values())) | {"seconds": time.perf_counter() - started}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['examples']} examples, {found['misses']} of them off by more than allowed, "
        f"{found['unknown']} unknown; {found['recording_s']:.0f} CPU s of recording tapes, "
        f"{found['comparing_s']:.0f} of dry runs"
    )
    for name in QUANTITIES if found["examples"] else ():
        one = found[name]
        print(
            f"{name:14} median {one['median_bytes'] / 2**20:8.3f} MiB, "
            f"worst {one['worst_bytes'] / 2**20:8.3f} MiB "
            f"({one['worst_of_allowed']:.0%} of what is allowed): {one['worst_example'].partition(': ')[0]}"
        )


if __name__ == "__main__":
    main()
