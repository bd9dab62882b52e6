"""The history of a user: a file of one JSON object a line, for each job that has measured its steps.

A line is written whole or not at all, and by one process at a time; other lines are ignored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from costmodels.catalogue.measured_devices import Machine
from costmodels.errors import InputError
from costmodels.files import MIB, read_at_most
from costmodels.paths import home_of
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import Count, Name, Positive, Record
from planner.history.step_parts import StepParts

LARGEST_HISTORY = 256 * MIB


class PastRun(Record):
    """The measurements of a job on one machine, and the prediction of its plan."""

    version: Literal[1] = 1
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d")]
    machine: Machine
    """The machine of the first rank."""
    software: dict[str, Name]
    """Versions by the name of the software."""
    model: ModelSpec
    layout: Layout
    cluster: Cluster
    """The cluster that the plan was made for."""
    engine: Name
    compiled: bool
    """True if the layers were compiled."""
    records: Count
    """Number of log lines whose step times give the median."""
    step_time_s: Positive
    """Median of the steps after the warm-up."""
    peak_memory_bytes: Positive
    predicted_step_time_s: Positive
    predicted_low_s: Positive
    predicted_high_s: Positive
    predicted_peak_bytes: Positive
    predicted: StepParts
    parts: StepParts | None = None
    """Profiled parts of the step on the first rank, scaled to the step time; None without a profile."""


def history_file() -> Path:
    """Path of this user's history, whether or not the file is there."""
    return home_of("XDG_DATA_HOME", ".local/share") / "planner" / "history.jsonl"


def append(run: PastRun, path: Path | None = None) -> None:
    """Add a line; raises `OSError` and leaves the file unchanged where this fails."""
    path = path or history_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    line = run.model_dump_json(exclude_defaults=True).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with _alone(descriptor):
            size = os.fstat(descriptor).st_size
            # A line that a full disk has cut short must not swallow this one.
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            data = b"\n" + line if torn else line
            if os.write(descriptor, data) < len(data):
                os.ftruncate(descriptor, size)
                raise OSError(28, "No space left on device")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alone(descriptor: int) -> Iterator[None]:
    """Lock a file against writes of other processes, where the file system can."""
    try:
        import fcntl
    except ImportError:  # Of Windows, where appending is all that there is.
        yield
        return
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield


def past_runs(path: Path | None = None) -> tuple[list[PastRun], int]:
    """The runs of a history in order, and the number of lines that are not runs; empty where there is no
    file.

    Raises `InputError` for a file that cannot be read.
    """
    path = path or history_file()
    try:
        text = read_at_most(path, LARGEST_HISTORY)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise InputError(f"history {path}: cannot be read ({error.strerror or error})") from None
    found, wrong = [], 0
    for line in text.splitlines():
        try:
            found.append(PastRun.model_validate_json(line))
        except ValidationError:
            wrong += bool(line.strip())
    return found, wrong
