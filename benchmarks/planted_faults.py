"""The share of faults in the runtime that tests find: `python -m benchmarks.planted_faults`.

The faults are data, in the lists of the folder planted_faults: a text in a file of `runtime`, its
replacement, and tests that should notice the fault, the likeliest first. Each fault is planted in a copy of
this tree, and its tests run there until one fails. A fault whose text is not in its file exactly once is
stale: the code has changed, and the fault must be written anew.

Each list was written without a look at the tests, and run once. Then tests were written for the missed
faults, which `results/planted_faults_*.txt` list.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.warm_tests import FAILED, WarmTests
from costmodels.errors import InputError
from planner.options.flags import run

ROOT = Path(__file__).parents[1]

LISTS = Path(__file__).with_suffix("")
"""The folder of all lists."""


@dataclass(frozen=True)
class Fault:
    """One fault, and the tests that should notice it."""

    name: str
    """The fault in words."""
    file: str
    """The file, below `runtime`."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest, each for a run of its own: a file, or tests of a file."""
    added: str = ""
    """The test that was written because no other test had noticed the fault."""

    @property
    def part(self) -> str:
        """The folder of `runtime` that holds the file."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Outcome:
    """The result of planting one fault."""

    fault: Fault
    word: str
    """`found`, `missed`, `stale`, or `broken`: its tests did not run."""
    by: str = ""
    """The tests that noticed the fault, or the reason why it could not be planted."""


Tests = Callable[[str], "tuple[int, str]"]
"""Function that runs tests in the copy; returns the exit code of pytest and the names of failed tests."""


def read_faults(path: Path = LISTS) -> list[Fault]:
    """The faults of a list, or of all lists in a folder."""
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    entries: list[dict[str, Any]] = [entry for file in files for entry in yaml.safe_load(file.read_text())]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def staleness(fault: Fault, root: Path) -> str:
    """The reason why a fault cannot be planted in a tree; empty if it can."""
    path = root / "runtime" / fault.file
    if not path.exists():
        return f"no file {fault.file}"
    times = path.read_text().count(fault.old)
    return "" if times == 1 else f"its text is {times} times in {fault.file}"


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """Context in which the tree has the fault; afterwards it is removed."""
    path = root / "runtime" / fault.file
    right = path.read_text()
    path.write_text(right.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(right)


def outcome(fault: Fault, root: Path, tests: Tests) -> Outcome:
    """Plant a fault and run its tests until one fails."""
    reason = staleness(fault, root)
    if reason:
        return Outcome(fault, "stale", reason)
    with planted(fault, root):
        for words in fault.tests:
            code, failed = tests(words)
            if code == FAILED:
                return Outcome(fault, "found", failed)
            if code:
                return Outcome(fault, "broken", f"pytest {words}: exit code {code}")
    return Outcome(fault, "missed")


def copied(root: Path, target: Path) -> None:
    """Copy the tracked files of a working tree, with uncommitted changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def counted(outcomes: Iterable[Outcome]) -> str:
    """Counts of faults by outcome, in words."""
    found = list(outcomes)
    words = Counter(one.word for one in found)
    added = sum(bool(one.fault.added) for one in found if one.word == "found")
    rest = [f"{words[word]} {word}" for word in ("missed", "stale", "broken") if words[word]]
    line = f"{len(found)} faults: " + ", ".join([f"{words['found']} found", *rest])
    return f"{line}; {added} of them by a test that was added for the fault" if added else line


def chosen(faults: Sequence[Fault], only: str, source: Path = LISTS) -> list[Fault]:
    """The faults of `source` whose name or file contains these words; `InputError` if there are none."""
    found = [fault for fault in faults if only in fault.name or only in fault.file]
    if not found:
        raise InputError(f"--only {only!r}: no fault of {source.name} has this in its name or file")
    return found


app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Only faults with this in their name or file.")] = "",
    check: Annotated[bool, typer.Option(help="Only say which faults are stale; no test runs.")] = False,
    source: Annotated[
        Path,
        typer.Option("--faults", exists=True, help="One list, or a folder of them, instead of all."),
    ] = LISTS,
) -> None:
    """Plant faults one by one, and check whether tests find them."""
    faults = chosen(read_faults(source), only, source)
    if check:
        stale = {fault.name: reason for fault in faults if (reason := staleness(fault, ROOT))}
        for name, reason in stale.items():
            print(f"stale: {name}: {reason}")
        print(f"{len(faults)} faults, {len(stale)} stale")
        raise typer.Exit(int(bool(stale)))
    outcomes = []
    # Not a TemporaryDirectory, which forks that tests let end remove too.
    folder = Path(tempfile.mkdtemp(prefix="planted-faults-"))
    try:
        tree = folder / "tree"
        copied(ROOT, tree)
        tests = WarmTests(tree)
        for fault in faults:
            outcomes.append(outcome(fault, tree, tests))
            print(f"{outcomes[-1].word}: {fault.name}: {outcomes[-1].by}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    rows = [(one.fault.part, one.fault.name, one.word, Path(one.by).name) for one in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(counted(outcomes))
    raise typer.Exit(int(any(one.word != "found" for one in outcomes)))


if __name__ == "__main__":
    run(app, "benchmarks.planted_faults")
