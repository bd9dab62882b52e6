"""metrics.jsonl: one JSON object for each logged step and each evaluation. Never imports torch."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from runtime.logs.line_file import keep_lines, parsed_lines, read_lines

METRICS_FILE = "metrics.jsonl"


def read_metrics(log_dir: str | Path) -> list[dict[str, Any]]:
    """Records of a run so far, without an incomplete last line."""
    return read_lines(Path(log_dir) / METRICS_FILE)


class MetricsReader:
    """A reader of the file of a job that is about to start and will replace the file."""

    def __init__(self, log_dir: str | Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self.file, self.offset = self._state()

    def new_records(self) -> list[dict[str, Any]]:
        """Records completed since the last call; a new file is read from its beginning.

        Empty for a file that cannot be read.
        """
        file, size = self._state()
        if file != self.file or size < self.offset:
            self.file, self.offset = file, 0
        if size <= self.offset:
            return []
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                complete, newline, _ = stream.read().rpartition(b"\n")
        except OSError:
            return []
        self.offset += len(complete + newline)
        return list(parsed_lines(complete))

    def _state(self) -> tuple[int, int]:
        """Inode and bytes of the file; zeros when there is none."""
        try:
            status = self.path.stat()
        except OSError:
            return 0, 0
        if not stat.S_ISREG(status.st_mode):
            return 0, 0
        return status.st_ino, status.st_size


class FollowedMetrics:
    """All records of a run so far; the file grows, or is rewritten when the run resumes from an earlier
    iteration."""

    def __init__(self, log_dir: str | Path) -> None:
        self._reader = MetricsReader(log_dir)
        self._reader.offset = 0
        self._records: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """The present records, without the load of each expert, which is most of a line."""
        file, offset = self._reader.file, self._reader.offset
        found = self._reader.new_records()
        if self._reader.file != file or self._reader.offset < offset:
            self._records.clear()
        for record in found:
            record.pop("expert_load", None)
        self._records += found
        return list(self._records)


def drop_metrics_after(log_dir: str | Path, iteration: int) -> Path:
    """Drop the records of steps after `iteration`, which a resumed run repeats; returns the file."""
    path = Path(log_dir) / METRICS_FILE
    keep_lines(path, iteration)
    return path
