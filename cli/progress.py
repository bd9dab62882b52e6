"""Lines that a training job shows while it runs: Megatron-LM's log lines, or short lines on a terminal."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from cli.status import Status
from planner.budget.words import DAY, duration, scaled_number
from runtime.job.log_lines import PROGRESS_START
from runtime.logs.console import PROGRESS, say

LOG_LINE = re.compile(r" (?:\[[^]]*\]|(validation|test) loss at) iteration +(\d+)")
"""Pattern of lines whose figures are in metrics.jsonl too; its groups are the kind of evaluation and the
iteration."""


WIDTH = 80

Key = tuple[str, int]
"""The kind of a record and its iteration."""

MOST_WAITING = 4
"""Most lines that wait for their records in metrics.jsonl; lines without a record are shown unchanged."""


class Display:
    """The lines of a job on screen; an error here is not raised, and is told once."""

    def __init__(self, status: Status, train_iters: int) -> None:
        self.status, self.train_iters = status, train_iters
        self.failed = False
        self.waiting: deque[tuple[Key | None, str]] = deque()
        """Lines to show: the first is one of the log, shown as it is unless its record comes."""
        self.records: dict[Key, dict[str, Any]] = {}
        """Records whose lines are still to come."""

    def line(self, text: str) -> None:
        """Show a line of the job."""
        self._try(self._line, text)

    def metrics(self, record: dict[str, Any]) -> None:
        """Show a record of the job's metrics."""
        self._try(self._record, record)

    def end(self) -> None:
        """Show the lines that still wait."""
        self._try(self._settle)

    def _try(self, show: Callable[..., None], *what: Any) -> None:
        if self.failed:
            return
        try:
            show(*what)
        except Exception as error:
            self.failed = True
            say(
                f"planner: warning: the job is shown no more ({type(error).__name__}: {error}) and goes on; "
                "its lines are in output.log",
                sys.stderr,
            )

    def _line(self, text: str) -> None:
        if self.status.on_screen and text.startswith(PROGRESS_START):
            return  # The short line of the step says it.
        phase = PROGRESS.fullmatch(text)
        if phase:
            self.status.tell(phase[1])
            return
        logged = LOG_LINE.match(text) if self.status.on_screen else None
        key = (f"{logged[1]}_loss" if logged[1] else "loss", int(logged[2])) if logged else None
        self.waiting.append((key, text))
        self._match()

    def _record(self, record: dict[str, Any]) -> None:
        for name in ("loss", "validation_loss", "test_loss"):
            if name in record:
                self.records[name, record["iteration"]] = record
        self._match()

    def _match(self) -> None:
        """Show waiting lines that need no record or whose record has come; where too many wait, also the
        oldest."""
        while self.waiting:
            key, text = self.waiting[0]
            record = None if key is None else self.records.pop(key, None)
            if key is not None and record is None and len(self.waiting) <= MOST_WAITING:
                return
            self.waiting.popleft()
            if record is None:
                self.status.line(text)
            else:
                self.status.line(short_line(record, self.train_iters))
                self.status.show(f"training, step {record['iteration']} of {self.train_iters}")

    def _settle(self) -> None:
        while self.waiting:
            self.status.line(self.waiting.popleft()[1])


def short_line(record: dict[str, Any], train_iters: int) -> str:
    """A record of metrics.jsonl in less than 80 columns."""
    iteration = record["iteration"]
    start = f"step {iteration:{len(str(train_iters))}}/{train_iters}"
    for name in ("validation_loss", "test_loss"):
        if name in record:
            return f"{start}  {name.replace('_', ' ')} {_loss(record[name])}"
    left = record["step_time_s"] * (train_iters - iteration)
    eta = duration(left) if left >= DAY else str(timedelta(seconds=round(left)))
    rate = scaled_number(record["tokens_per_s"])
    line = f"{start}  loss {_loss(record['loss'])}  {rate} tokens/s  ETA {eta}"
    predicted = record.get("predicted_step_time_s")
    beside = f"  {record['step_time_s'] / predicted:.2g} x predicted" if predicted else ""
    return line + beside if len(line) + len(beside) < WIDTH else line


def _loss(value: float | None) -> str:
    """A loss as text; in JSON a loss that is not a number is null."""
    if value is None:
        return "is no number"
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"
