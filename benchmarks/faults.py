"""A run that is killed repeatedly: `python -m benchmarks.faults --kills 30 --steps 300 --seed 1`.

Ranks, all ranks or the launcher are killed with SIGKILL at random moments: during steps, while a checkpoint
is being written, while the job starts. Each time the job starts again from its last checkpoint, with another
number of ranks and another layout, some of them planned by the runtime itself. In the end the losses of all
steps must equal those of an undisturbed run, and no sample may be lost or repeated.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.fault_audit import Attempt, Audit, attempt, audit
from costmodels.errors import InputError
from planner.options.flags import run
from runtime.data import IndexedWriter
from runtime.logs.metrics_file import MetricsReader
from tests.support.running_jobs import RunningJob, forked, under_torchrun

MODEL = (
    *("--model", "gpt2-nano", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--fp32", "--device", "cpu", "--max-global-batch-size", "12"),
)

LAYOUTS: tuple[tuple[int, str], ...] = (
    *((1, ""), (2, ""), (3, ""), (4, "")),
    *((2, "tp=2"), (2, "pp=2"), (2, "dp=2,zero=1"), (2, "dp=2,zero=3"), (2, "cp=2"), (3, "dp=3,zero=2")),
    *((4, "tp=2,dp=2"), (4, "pp=2,dp=2"), (2, "pp=2,vpp=2,schedule=interleaved")),
)
"""Number of ranks and pins; without pins the runtime chooses the layout."""

TOLERANCE = 1e-5
"""Largest allowed relative difference of the losses."""

TIMEOUT_S = 300.0
"""Seconds without progress after which a job counts as stuck."""

ENDS_WITHIN_S = 45.0
"""Seconds after which remaining processes of a killed job are an error; torchrun gives its ranks 30
seconds."""


@dataclass(frozen=True)
class Kill:
    """A process that was killed, the moment, and the outcome."""

    victim: str
    moment: str
    ranks: int
    pins: str
    resumed_at: int
    """The iteration at which the killed job began."""
    reached: int
    """The last iteration that it logged."""
    ended_s: float
    """Seconds until the last process of the job had ended."""
    left_over: int
    """Number of processes that this program had to end."""


class Soak:
    """One run in a folder, with its random kills."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        seed: int,
        start: Callable[[Sequence[str], int, Path], RunningJob],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.steps, self.start, self.say = folder, steps, start, say
        self.random = random.Random(seed)
        self.data = write_corpus(folder, self.random)
        self.checkpoints = folder / "checkpoints"
        self.attempts: list[Path] = []

    def arguments(self, log: Path, pins: str, saves: bool) -> list[str]:
        """Flags of the next start."""
        words = [*MODEL, "--data-path", self.data, "--split", "100,0,0", "--eval-iters", "0"]
        words += [
            "--train-iters",
            str(self.steps),
            "--lr",
            "1e-3",
            "--lr-warmup-iters",
            "5",
            "--clip-grad",
            "1",
        ]
        words += ["--log-interval", "1", "--log-dir", str(log), "--log-samples"]
        for pin in filter(None, pins.split(",")):
            words += ["--pin", pin]
        if saves:
            folder = str(self.checkpoints)
            words += ["--save", folder, "--load", folder, "--save-interval", "6", "--keep-last", "2"]
            words += ["--async-save"] * (self.random.random() < 0.5)
        return words

    def undisturbed(self) -> Path:
        """Train once on one rank; returns the folder of its log."""
        log = self.folder / "undisturbed"
        log.mkdir()
        job = self.start(self.arguments(log, "", saves=False), 1, log / "output")
        if job.exit_code():
            raise RuntimeError(f"the undisturbed run failed:\n{(log / 'output').read_text()}")
        return log

    def begin(self) -> tuple[RunningJob, Path, int, str]:
        """Start the job with another layout."""
        ranks, pins = self.random.choice(LAYOUTS)
        log = self.folder / f"attempt-{len(self.attempts):03d}"
        log.mkdir()
        self.attempts.append(log)
        return self.start(self.arguments(log, pins, saves=True), ranks, log / "output"), log, ranks, pins

    def kill_at(self, target: int) -> Kill:
        """Start the job and kill it near iteration `target`."""
        job, log, ranks, pins = self.begin()
        moment = self.random.choices(("step", "save", "start"), (50, 35, 15))[0]
        victim = self.random.choices(("rank", "all ranks", "launcher"), (60, 20, 20))[0]
        try:
            moment = self._wait(job, log, moment, target)
            victim = self._shoot(job, victim)
            since = time.monotonic()
            while job.left_over() and time.monotonic() - since < ENDS_WITHIN_S:
                time.sleep(0.05)
            seconds, left = time.monotonic() - since, len(job.left_over())
        finally:
            job.end()
        seen = attempt(log)
        return Kill(victim, moment, ranks, pins, seen.resumed_at, seen.reached, seconds, left)

    def _wait(self, job: RunningJob, log: Path, moment: str, target: int) -> str:
        """Wait for the moment of the kill; returns its description."""
        if moment == "start":
            time.sleep(self.random.uniform(0.0, 1.5))
            return moment
        reader, reached = MetricsReader(log), 0
        until = time.monotonic() + TIMEOUT_S
        while not job.has_ended():
            reached = max([reached, *(record["iteration"] for record in reader.new_records())])
            saving = any(self.checkpoints.glob("iter_*.partial"))
            if moment == "step" and reached >= target:
                time.sleep(self.random.uniform(0.0, 0.05))
                return moment
            if moment == "save" and saving and reached >= min(target, self.steps - 6):
                time.sleep(self.random.uniform(0.0, 0.02))
                return moment
            if time.monotonic() > until:
                raise RuntimeError(f"the job does not move on:\n{(log / 'output').read_text()}")
            time.sleep(0.002)
        return "end"

    def _shoot(self, job: RunningJob, victim: str) -> str:
        ranks = job.ranks()
        chosen = {"rank": [self.random.choice(ranks)] if ranks else [], "all ranks": ranks}
        targets = chosen.get(victim) or [job.launcher]
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim == "rank" and ranks:
            return f"rank {ranks.index(targets[0])}"
        return victim if ranks else "launcher"

    def finish(self) -> None:
        """Let the job run to its end."""
        job, log, _, _ = self.begin()
        if job.exit_code():
            raise RuntimeError(f"the last start failed:\n{(log / 'output').read_text()}")

    def soak(self, kills: int) -> tuple[list[Kill], list[Attempt], Audit]:
        """Kill the run several times, finish it, and compare it with an undisturbed one."""
        reference = self.undisturbed()
        # The last ones come before the end: the run must have something left to do.
        targets = sorted(self.random.randrange(1, max(2, self.steps - 8)) for _ in range(kills))
        done = []
        for number, target in enumerate(targets, 1):
            done.append(self.kill_at(target))
            self.say(f"kill {number} of {kills}: {describe(done[-1])}")
        self.finish()
        attempts = [attempt(log) for log in self.attempts]
        return done, attempts, audit(attempts, reference, self.steps)


def describe(kill: Kill) -> str:
    """A kill in one line."""
    return (
        f"{kill.victim} during {kill.moment}, {kill.ranks} ranks {kill.pins or '(planned)'}, "
        f"from {kill.resumed_at} to {kill.reached}, ended in {kill.ended_s:.1f} s"
    )


def write_corpus(folder: Path, source: random.Random) -> str:
    """Write a token file of bytes with some hundred documents of random words; returns its prefix."""
    prefix = str(folder / "words")
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(400):
            text = " ".join("".join(source.choices("abcde", k=4)) for _ in range(80))
            writer.add_document([*text.encode(), 256])
    return prefix


def short(one: Attempt) -> str:
    """The degrees of an attempt's layout, without degrees of 1 and ZeRO 0."""
    words = one.layout.partition(" mbs")[0].split()
    return " ".join(word for word in words if not word.endswith(("=1", "zero=0"))) or (
        "one rank" if words else "(not yet)"
    )


def rows(kills: Sequence[Kill], attempts: Sequence[Attempt]) -> list[list[str]]:
    """The table: each kill, and the next attempt."""
    found = []
    for number, (kill, before, after) in enumerate(zip(kills, attempts, attempts[1:], strict=False), 1):
        found.append(
            [
                str(number),
                kill.victim,
                kill.moment,
                str(kill.reached),
                short(before),
                str(after.resumed_at) if after.layout else "-",
                short(after),
                f"{kill.ended_s:.1f}",
                str(kill.left_over),
            ]
        )
    return found


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of any width, so that layouts are not truncated."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


COLUMNS = ("kill", "of", "during", "at", "before", "resumed", "after", "ended s", "left over")

app = typer.Typer(add_completion=False)


@app.command()
def faults(
    kills: Annotated[int, typer.Option(help="How often the run is killed.")] = 30,
    steps: Annotated[int, typer.Option(help="Iterations of the run.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the kills, their moments and the layouts.")] = 1,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Start every job under torchrun, which takes longer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill a run at random moments and check that nothing is lost."""
    if kills < 0 or steps < 16:
        raise InputError(f"--kills {kills} --steps {steps}: need at least 0 kills and 16 steps")
    since = time.monotonic()
    start = under_torchrun if torchrun else forked
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        soak = Soak(Path(folder), steps, seed, start, lambda line: print(line, file=sys.stderr, flush=True))
        done, attempts, found = soak.soak(kills)
        lines = rows(done, attempts)
    failures = found.failures(TOLERANCE)
    left = sum(kill.left_over for kill in done)
    failures += [f"{left} processes left behind"] if left else []
    result: dict[str, Any] = {
        "kills": [asdict(kill) for kill in done],
        "audit": asdict(found),
        "seconds": time.monotonic() - since,
        "failures": failures,
    }
    if as_json:
        json.dump(result, sys.stdout)
        print()
    else:
        print("\n".join(aligned([COLUMNS, *lines])))
        print(
            f"{kills} kills over {steps} steps in {result['seconds']:.0f} s (seed {seed}, "
            f"{'torchrun' if torchrun else 'forked ranks'}): largest relative difference of a loss "
            f"{found.largest_difference:.1e}; samples lost {len(found.lost)}, repeated "
            f"{len(found.repeated)}, changed {len(found.changed)}; checkpoints lost "
            f"{len(found.lost_checkpoints)}; processes left behind {left}"
        )
        print("verdict: " + ("; ".join(failures) if failures else "as if it had never been killed"))
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app, "benchmarks.faults")
