"""Samples that each step consumed: `samples-N.jsonl` in the log folder, one for each data-parallel rank.

A line holds the numbers of the samples in the order of the run, and the CRC-32 of their tokens. A number
means the same tokens under every layout.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from costmodels.files import read_text
from runtime.logs.line_file import LARGEST_LOG, LineFile, keep_lines

NAME = "samples-{}.jsonl"


class SampleLog:
    """The file of one data-parallel rank."""

    def __init__(self, log_dir: str | Path, dp_rank: int) -> None:
        self.file = LineFile(Path(log_dir) / NAME.format(dp_rank))

    def step(self, iteration: int, samples: Sequence[int], tokens: npt.NDArray[np.int64]) -> None:
        """Note the samples of a step and their tokens, one row each."""
        sums = [zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in tokens]
        record = {"iteration": iteration, "samples": list(samples), "checksums": sums}
        self.file.write(json.dumps(record))


def drop_samples_after(log_dir: str | Path, iteration: int) -> None:
    """Drop the records of steps after `iteration`, which a resumed run repeats, for all ranks."""
    for path in Path(log_dir).glob(NAME.format("*")):
        keep_lines(path, iteration)


def read_samples(log_dir: str | Path) -> dict[int, dict[int, int]]:
    """The samples that each iteration consumed, each with the checksum of its tokens.

    Raises `ValueError` when a sample was consumed twice in a step.
    """
    found: dict[int, dict[int, int]] = {}
    for path in sorted(Path(log_dir).glob(NAME.format("*"))):
        for line in read_text(path, LARGEST_LOG).splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            record = json.loads(line)
            step = found.setdefault(record["iteration"], {})
            for sample, checksum in zip(record["samples"], record["checksums"], strict=True):
                if sample in step:
                    raise ValueError(
                        f"{path}: sample {sample} twice in the step of iteration {record['iteration']}"
                    )
                step[sample] = checksum
    return found
