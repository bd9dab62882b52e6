"""Small training jobs in processes of their own, and the text that they train on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runtime.data import IndexedWriter
from runtime.processes.children import children
from tests.support import ROOT

TINY = (
    *("--model", "gpt2-nano", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16"),
)
"""A model whose step takes a few milliseconds."""

LAYOUT = ("--device", "cpu", "--global-batch-size", "4", "--pin", "dp=2", "--pin", "zero=1", "--fp32")
"""Two data-parallel ranks."""

TIMEOUT_S = 600.0
"""After which a job that should have moved on is stuck, however busy the machine is."""


def write_corpus(folder: Path) -> str:
    """Prefix of a token file of bytes: a hundred documents of random words."""
    words = random.Random(1)
    prefix = str(folder / "words")
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(100):
            text = " ".join("".join(words.choices("abcde", k=4)) for _ in range(80))
            writer.add_document([*text.encode(), 256])
    return prefix


def torchrun(*arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `torchrun -m runtime.pretrain` on two ranks; what it prints goes to `log`."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, "-m", "runtime.pretrain", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    below = children(pid)
    return below + [lower for child in below for lower in descendants(child)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listing.returncode == 0 and not listing.stdout.startswith("Z")


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
