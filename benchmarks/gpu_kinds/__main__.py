"""Every kind of job on one GPU, a few steps each: `python -m benchmarks.gpu_kinds [--jobs 6]`.

Each kind has a process of its own, several at a time. Failed kinds are tried again with
CUDA_LAUNCH_BLOCKING=1, and without compilation. Losses and gradient norms are compared with those of a CPU
(expected.json, which `--expected` writes). Peaks of memory by the plan and by the allocator are shown side by
side. All output is kept below `--output`: `table.txt`, `table.json`, and a folder for each kind and attempt.
Without a GPU, kinds that can run on a CPU run there, and the others are listed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu_kinds.attempts import AS_IT_IS, SECOND_TRIES, Form, Machine, Result, attempt
from benchmarks.gpu_kinds.inputs import write_inputs
from benchmarks.gpu_kinds.kinds import chosen, read_expected, read_kinds, write_expected
from benchmarks.gpu_kinds.report import Row, summary
from costmodels.errors import InputError
from planner.options.flags import run

GRACE_S = 20.0
"""Seconds that running processes have to end after the time limit."""

LEAST_S = 10.0
"""Fewest remaining seconds with which a kind is still started."""


class Clock:
    """The remaining time."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds during which a kind may still be started."""
        return self.ends - time.monotonic()


def run_all(
    rows: list[Row], machine: Machine, jobs: int, clock: Clock, limit_s: float, tell: Callable[[Row], None]
) -> None:
    """Run all rows, `jobs` at a time; then, as long as there is time, second tries of those that failed."""

    def one(row: Row, form: Form) -> Result | None:
        left_s = clock.left_s()
        if left_s < min(LEAST_S, limit_s):
            return None
        began = time.monotonic()
        try:
            return attempt(row.kind, form, machine, min(limit_s, left_s + GRACE_S))
        except Exception as error:
            # A fault of this command costs its row, not the others.
            said = f"benchmarks.gpu_kinds: {type(error).__name__}: {error}"
            return Result(False, time.monotonic() - began, said, refused=True)

    with ThreadPoolExecutor(jobs) as pool:
        waiting: dict[Future[Result | None], tuple[Row, Form]] = {}
        for row in rows:
            if not row.not_run:
                waiting[pool.submit(one, row, AS_IT_IS)] = row, AS_IT_IS
            else:
                tell(row)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                row, form = waiting.pop(future)
                result = future.result()
                if result is not None:
                    row.results[form.name] = result
                elif form is AS_IT_IS:
                    row.not_run = "not run, no time was left"
                else:
                    row.left_out.append(form.name)
                if form is AS_IT_IS and result is not None and not (result.ran or result.refused):
                    for again in SECOND_TRIES:
                        waiting[pool.submit(one, row, again)] = row, again
                tell(row)


def capability() -> tuple[int, int] | None:
    """The compute capability of this machine's first GPU; None without one."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def device_words(on_gpu: bool) -> str:
    """The device and the software, for the head of the table."""
    import torch

    name = torch.cuda.get_device_name(0) if on_gpu else f"CPU, {os.cpu_count()} cores"
    return f"{name}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}"


@contextmanager
def _output(folder: Path | None) -> Iterator[Path]:
    """The folder of all output, a new one unless given."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gpu-kinds-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: cannot be made: {error.strerror}") from None
    yield folder
    print(f"all output is in {folder}")


def gpu_kinds(
    jobs: Annotated[int, typer.Option(min=1, help="Kinds that run at the same time.")] = 6,
    output: Annotated[Path | None, typer.Option(help="Folder of all output; a new one unless given.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run the kinds whose name has this in it; repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Begin nothing after so long.")] = 240.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of an attempt at most.")] = 150.0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile layers on a CPU, too.")] = False,
    expected: Annotated[
        bool, typer.Option("--expected", help="Run on the CPU, and keep its losses as those to compare with.")
    ] = False,
) -> None:
    """Run every kind of job on this machine's first GPU, and list those that did not run."""
    train, kinds = read_kinds()
    kinds = chosen(kinds, only or [])
    able = None if expected else capability()
    found = read_expected()
    rows = [
        Row(
            kind,
            not_run=kind.missing(able),
            expected=None if expected else found.get(kind.like or kind.name),
        )
        for kind in kinds
        if not (expected and kind.like)
    ]
    head = device_words(able is not None)
    print(head, flush=True)

    with _output(output) as folder, tempfile.TemporaryDirectory(prefix="gpu-kinds-work-") as work:
        inputs = write_inputs(Path(work) / "inputs")
        threads = max(1, (os.cpu_count() or 1) // jobs)
        machine = Machine(folder, Path(work), inputs, train, able is not None, threads, compiled)

        def tell(row: Row) -> None:
            print(row.lines()[-1] if row.results or row.not_run else "", flush=True)
            _keep(folder, head, rows)

        run_all(rows, machine, jobs, Clock(seconds), timeout, tell)
        _keep(folder, head, rows)
    print(summary(rows))
    if expected:
        import torch

        write_expected(
            {
                row.kind.name: {"losses": list(row.first.losses), "norms": list(row.first.norms)}
                for row in rows
                if row.first is not None and row.first.ran and row.first.losses
            },
            torch.__version__,
        )
    if not all(row.is_right for row in rows):
        raise typer.Exit(1)


def _keep(folder: Path, head: str, rows: list[Row]) -> None:
    """Write the results so far, so that the table exists even if this process is killed."""
    lines = [line for row in rows if row.results or row.not_run for line in row.lines()]
    (folder / "table.txt").write_text("\n".join([head, *lines, "", summary(rows)]) + "\n", encoding="utf-8")
    content = {"device": head, "rows": [row.record() for row in rows if row.results or row.not_run]}
    (folder / "table.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(gpu_kinds)
    run(app, "benchmarks.gpu_kinds")
