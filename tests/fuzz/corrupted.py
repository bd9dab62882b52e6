"""Corrupted files must be refused in one line: `python -m tests.fuzz --inputs 5000 --seed 1`.

Files of many kinds are corrupted one at a time and read: plan files, config.json, YAML of models and devices,
network tables, `.idx` and `.bin`, and the files of a checkpoint. So are scripts and configurations of other
software, which may run, open and write nothing. A value that is read must be as it was written, or end in one
line of `InputError`. Other valid values may come out only where nothing tells a changed number from a meant
one, and never where checksums guard them. No other exception may come out, and no hang. Then some hundred
files are read that were made to do harm (`tests.fuzz.hostile`), of which nothing may be run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from unicodedata import category

import typer

from cli.tables import console, table
from costmodels.errors import InputError
from planner.options.flags import one_line
from tests.fuzz.mutations import corrupt
from tests.fuzz.valid_files import Target, targets

CPU_SECONDS = 5.0
"""CPU seconds that reading one input may take."""

SECONDS = 120.0
"""Seconds that reading one input may take in all, on a machine that does other things too."""

MEMORY_BYTES = 6 << 30
"""Bytes of address space that reading may add."""

LONGEST_LINE = 2000
"""Characters of a message that somebody still reads."""

OUTCOMES = ("refused", "same", "other", "failed")


class Hangs(BaseException):
    """Reading takes too long. Not an `Exception`, which a reader might catch."""


@dataclass(frozen=True)
class Failure:
    """One input that did not end well."""

    target: str
    file: str
    number: int
    what: str


@contextmanager
def limited(cpu_seconds: float = CPU_SECONDS) -> Iterator[None]:
    """Raise `Hangs` when what follows takes too long."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hangs

    previous = {kind: signal.signal(kind, late) for kind in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def judge(load: Callable[[], Any], original: Any, checked: bool) -> tuple[str, str]:
    """Read one input: an outcome of `OUTCOMES`, and what is wrong with a failed one."""
    try:
        with limited():
            loaded = load()
            same = equal(loaded, original)
    except InputError as error:
        line = one_line(error)
        wrong = not line or len(line) > LONGEST_LINE or any(category(c) == "Cc" for c in line)
        return ("failed", f"its line is no line: {line[:200]!r}") if wrong else ("refused", line)
    except Hangs:
        return "failed", "hangs"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return "failed", f"{type(error).__name__} at {where}: {str(error)[:200]}"
    if same:
        return "same", ""
    return ("failed", "other values than were written") if checked else ("other", "")


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals itself."""
    return bool(one == other) or repr(one) == repr(other)


class Bench:
    """A folder with the valid files of one target, of which one is corrupted at a time."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        for name, data in target.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.original = target.load(folder)

    def put(self, name: str, data: bytes) -> tuple[str, str]:
        """The outcome with `data` in the place of one file, which is put back."""
        path = self.folder / name
        # Not in place: a reader may have mapped the file.
        path.unlink()
        path.write_bytes(data)
        try:
            return judge(lambda: self.target.load(self.folder), self.original, self.target.checked)
        finally:
            for again, valid in self.target.files.items():
                kept = self.folder / again
                if again == name or not kept.exists():
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.unlink(missing_ok=True)
                    kept.write_bytes(valid)

    def corrupted(self, number: int, seed: int) -> tuple[str, bytes]:
        """The input of a number: the file that is corrupted, and its contents. The same each time."""
        source = random.Random(f"{seed} {self.target.name} {number}")
        name = source.choice(self.target.corrupted)
        data = self.target.files[name]
        if self.target.mutate is not None and source.random() < 0.5:
            return name, self.target.mutate(data, source)
        readable = name.endswith(".json")
        parse = self.target.parse or (json.loads if readable else None)
        return name, corrupt(data, source, parse)


def fuzz(
    chosen: Sequence[Target], inputs: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Counter[str]], list[Failure]]:
    """Read `inputs` corrupted files, spread over the targets by their weights."""
    counts: dict[str, Counter[str]] = {}
    failures: list[Failure] = []
    whole = sum(target.weight for target in chosen)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, _little_memory():
        for place, target in enumerate(chosen):
            bench = Bench(target, Path(folder) / str(place))
            counts[target.name] = Counter()
            for number in range(-(-inputs * target.weight // whole)):
                name, data = bench.corrupted(number, seed)
                outcome, what = bench.put(name, data)
                counts[target.name][outcome] += 1
                if outcome == "failed":
                    failures.append(Failure(target.name, name, number, what))
                    say(f"{target.name}, input {number}: {name}: {what}")
    return counts, failures


def attacked(only: str, say: Callable[[str], None]) -> tuple[dict[str, Counter[str]], list[Failure]]:
    """Read the hostile files with `only` in their name."""
    from tests.fuzz import hostile
    from tests.fuzz.valid_files import small_plan

    counts: dict[str, Counter[str]] = {}
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-hostile-") as name, _little_memory():
        folder = Path(name)
        for number, variant in enumerate(hostile.hostile(folder, small_plan())):
            kind = f"hostile {variant.name.partition(':')[0]}"
            if only not in kind:
                continue
            outcome, what = hostile.attack(variant, folder / "read", folder / hostile.CANARY)
            counts.setdefault(kind, Counter())[outcome] += 1
            if outcome == "failed":
                failures.append(Failure(kind, variant.name, number, what))
                say(f"{variant.name}: {what}")
    return counts, failures


@contextmanager
def _little_memory() -> Iterator[None]:
    """Make a reader fail that believes a huge number, instead of the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform != "linux":
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    inputs: Annotated[int, typer.Option(help="Corrupted files to read.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the corruptions.")] = 1,
    only: Annotated[str, typer.Option(help="Part of the name of the kinds of files to corrupt.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read corrupted files and count how that ends."""
    if inputs < 1:
        raise InputError(f"--inputs {inputs}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="fuzz-valid-") as folder:
        chosen = [target for target in targets(Path(folder)) if only in target.name]

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    counts, failures = fuzz(chosen, inputs, seed, say) if chosen else ({}, [])
    more = attacked(only, say)
    counts, failures = counts | more[0], failures + more[1]
    if not counts:
        raise InputError(f"--only {only}: no kind of file has this in its name")
    total = sum(counts.values(), Counter())
    if as_json:
        result = {"seed": seed, "outcomes": counts, "failures": [vars(one) for one in failures]}
        json.dump(result, sys.stdout)
        print()
    else:
        lines = [[name, *(str(found[kind]) for kind in OUTCOMES)] for name, found in counts.items()]
        console().print(table(("file", *OUTCOMES), lines, left=("file",)))
        parts = ", ".join(f"{total[kind]} {kind}" for kind in OUTCOMES)
        print(f"{total.total()} inputs (seed {seed}): {parts}")
    if failures:
        raise typer.Exit(1)
