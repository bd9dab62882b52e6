"""Flags of small training jobs, the text that they train on, and what they log."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from runtime.data import IndexedWriter

TINY = (
    *("--model", "gpt2-nano", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16"),
)
"""A model whose step takes a few milliseconds."""

LAYOUT = ("--device", "cpu", "--global-batch-size", "4", "--pin", "dp=2", "--pin", "zero=1", "--fp32")
"""Two data-parallel ranks."""

TIMEOUT_S = 600.0
"""Seconds after which a job that should have moved on is stuck, however busy the machine is."""


def write_corpus(folder: Path) -> str:
    """Prefix of a token file of bytes: a hundred documents of random words."""
    words = random.Random(1)
    prefix = str(folder / "words")
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(100):
            text = " ".join("".join(words.choices("abcde", k=4)) for _ in range(80))
            writer.add_document([*text.encode(), 256])
    return prefix


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for `condition`; fail, saying `what` was waited for, when it takes too long."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        time.sleep(0.02)


def losses(log_dir: Path) -> dict[int, float]:
    """Training loss by iteration; a line that is still being written is left out."""
    path = log_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["iteration"]: record["loss"] for record in records if "loss" in record}
