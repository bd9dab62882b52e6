"""Preparing text against the tokenizers library alone: megabytes a second of one core, and memory.

python -m benchmarks.data [--megabytes N] [--workers W ...] [--compress gz|zst] [--json]

The text is Python's standard library, one document a file, repeated to N megabytes, as JSON lines. The
library encodes the same texts in as many processes, one thread each, in batches of the same size. Its texts
are in memory already, without reading, parsing or writing. Speeds are megabytes of text (UTF-8) in a second
of one core, summed over all processes. Other programs may use the machine meanwhile, and cores that share
caches slow each other down.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from runtime.data.corpus import stdlib_files
from runtime.data.preparation import prepare
from runtime.data.tokenizers import gpt2_tokenizer

WANTED = 0.8
"""Share of the library's speed that preparing must reach."""

BATCH = 1024
"""Documents that are encoded at a time."""

SAMPLE_MEGABYTES = 64
"""Megabytes of text with which the library's own speed is measured."""


@dataclass(frozen=True)
class Speed:
    """Megabytes of text; seconds on the clock and of cores; largest resident memory of a process, MiB."""

    megabytes: float
    seconds: float
    core_seconds: float
    peak_mib: float

    @property
    def rate(self) -> float:
        """MB a second of one core."""
        return self.megabytes / self.core_seconds


def write_text(path: Path, megabytes: float) -> float:
    """JSON lines of the standard library's files, over and over; returns the megabytes of text in them."""
    corpus = texts()
    lines = [(json.dumps({"text": text}) + "\n", len(text.encode())) for text in corpus]
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": _open_zst}
    opener = openers.get(path.suffix, open)
    written = number = 0
    with opener(path, "wt", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            line, size = lines[number % len(lines)]
            file.write(line)
            written, number = written + size, number + 1
    return written / 1e6


def _open_zst(path: Path, mode: str, encoding: str) -> Any:
    import zstandard

    return zstandard.open(path, mode, encoding=encoding)


def texts() -> list[str]:
    """The documents of the corpus."""
    return [path.read_text("utf-8", errors="replace") for path in stdlib_files()]


def library(megabytes: float) -> Speed:
    """The tokenizers library on texts in memory."""
    model, corpus = gpt2_tokenizer().model, texts()
    endless = (corpus[number % len(corpus)] for number in itertools.count())
    size = tokens = 0
    start, cores = time.perf_counter(), _core_seconds()
    while size < megabytes * 1e6:
        batch = _some_megabytes(endless)
        for one in model.encode_batch_fast(batch, add_special_tokens=False):
            tokens += len(one.ids)
        size += sum(len(text.encode()) for text in batch)
    return Speed(size / 1e6, time.perf_counter() - start, _core_seconds() - cores, _peak_mib())


def _some_megabytes(endless: Iterator[str]) -> list[str]:
    batch, size = [], 0
    for text in islice(endless, BATCH):
        batch.append(text)
        size += len(text)
        if size > 4 * 2**20:
            break
    return batch


def whole(path: Path, prefix: Path, workers: int, megabytes: float) -> Speed:
    """`planner data prepare` from file to file, which hold `megabytes` of text."""
    tokenizer = gpt2_tokenizer()
    start, cores = time.perf_counter(), _core_seconds()
    prepare([path], prefix, tokenizer, workers=workers, chunk_size=BATCH)
    return Speed(megabytes, time.perf_counter() - start, _core_seconds() - cores, _peak_mib())


def _core_seconds() -> float:
    """CPU seconds of this process and the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_mib() -> float:
    """Peak MiB of this process or, if larger, of the largest of its children."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(one).ru_maxrss for one in who) / 1024


def _apart(processes: int, function: Callable[..., Speed], *arguments: Any) -> Speed:
    """The sum of results of simultaneous calls in fresh processes; memory is the largest peak among them."""
    with multiprocessing.get_context("spawn").Pool(processes, _one_thread) as pool:
        calls = [pool.apply_async(function, arguments) for _ in range(processes)]
        found = [call.get() for call in calls]
    return Speed(
        sum(speed.megabytes for speed in found),
        max(speed.seconds for speed in found),
        sum(speed.core_seconds for speed in found),
        max(speed.peak_mib for speed in found),
    )


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Processes of a pool may have no children of their own otherwise.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def main() -> None:
    """Measure and print; exit code 1 if preparing is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000.0, help="text to prepare")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--compress", choices=("gz", "zst"), help="read compressed text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found: dict[int, tuple[Speed, Speed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.jsonl" + (f".{options.compress}" if options.compress else ""))
        megabytes = write_text(path, options.megabytes)
        for workers in sorted(set(options.workers)):
            alone = _apart(workers, library, min(megabytes, SAMPLE_MEGABYTES) / workers)
            found[workers] = alone, _apart(1, whole, path, Path(folder, "out"), workers, megabytes)
    ratios = {workers: ours.rate / alone.rate for workers, (alone, ours) in found.items()}
    if options.json:
        rows = [
            {"workers": workers, "library": asdict(alone), "prepare": asdict(ours), "ratio": ratios[workers]}
            for workers, (alone, ours) in found.items()
        ]
        print(json.dumps({"rows": rows, "wanted": WANTED}))
    else:
        print(f"{'':28}{'MB':>8}{'s':>9}{'core s':>9}{'MB/core s':>11}{'ratio':>8}{'peak MiB':>10}")
        for workers, (alone, ours) in found.items():
            print(_row(f"tokenizers, {workers} at a time", alone, 1.0))
            print(_row(f"prepare, {workers} worker{'s' * (workers > 1)}", ours, ratios[workers]))
    if min(ratios.values()) < WANTED:
        raise SystemExit(f"slower than {WANTED} of the library's speed")


def _row(name: str, speed: Speed, ratio: float) -> str:
    numbers = f"{speed.megabytes:8.0f}{speed.seconds:9.1f}{speed.core_seconds:9.1f}{speed.rate:11.2f}"
    return f"{name:28}{numbers}{ratio:8.2f}{speed.peak_mib:10.0f}"


if __name__ == "__main__":
    main()
